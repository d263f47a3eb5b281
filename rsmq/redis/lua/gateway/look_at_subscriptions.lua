#!lua flags=no-writes
-- PURPOSE  Read for a router what has changed of the subscriptions that all routers follow, and who has subscribed to some
--          topic names by name, all as of one moment.
-- KEYS     for each shard (of one slot, on a cluster): changes stream, mark, names hash
-- ARGV     1 changes a shard:int; for each shard: position in its changes, whether to look for the names there:0|1; then
--          the names
-- RETURNS  for each shard {changes as of XREAD or nil, mark or nil, then the number (from 1) and the subscribers of each
--          name that has some}
-- WHY      A client that goes from a topic name to a wildcard, or back, is always in one of both. Read one after the
--          other, it could be met in neither.
local replies, first = {}, 2 + #KEYS / 3 * 2
for shard = 1, #KEYS / 3 do
  local changes, mark, names = KEYS[3 * shard - 2], KEYS[3 * shard - 1], KEYS[3 * shard]
  local found = redis.call('XREAD', 'COUNT', ARGV[1], 'STREAMS', changes, ARGV[2 * shard])
  local reply = { found and found[1][2], redis.call('GET', mark) }
  for from = first, ARGV[2 * shard + 1] == '1' and #ARGV or 0, 1000 do
    local values = redis.call('HMGET', names, unpack(ARGV, from, math.min(from + 999, #ARGV)))
    for i, value in ipairs(values) do
      if value then
        reply[#reply + 1] = from - first + i
        reply[#reply + 1] = value
      end
    end
  end
  replies[shard] = reply
end
return replies
