-- PURPOSE  Acknowledge handled messages, of one partition or of several.
-- KEYS     1 stream  2 lease hash  3 retry zset  and so on, three for each partition
-- ARGV     1 owner  2 group  then for each partition: epoch ('' = shared distribution: ownership is per message),
--          count:int, retried:int, so many stream ids, and so many members of the retry zset
-- RETURNS  for each partition {'OK', acknowledged:int} or {'STALE_EPOCH'}
-- WHY      XACK does not check the owner: a process that wakes from a pause would acknowledge another member's work.
--          Each lease is checked separately: a lost one does not keep the messages of the others pending. The start of
--          a retry has removed its member from the zset, but a failover may have lost that, and the settled message
--          would come again, after later ones of its key.
-- USES     may_write, can_write
local function settle(stream, lease, retry, epoch, first, last, parked)
  local acked = 0
  if epoch ~= '' then
    local holder = redis.call('HMGET', lease, 'owner', 'epoch')
    if holder[1] ~= ARGV[1] or holder[2] ~= epoch then return { 'STALE_EPOCH' } end
    for i = first, last, 1000 do
      acked = acked + redis.call('XACK', stream, ARGV[2], unpack(ARGV, i, math.min(i + 999, last)))
    end
    for i = last + 1, last + parked do redis.call('ZREM', retry, ARGV[i]) end
    return { 'OK', acked }
  end
  for i = first, last do
    local row = redis.call('XPENDING', stream, ARGV[2], ARGV[i], ARGV[i], 1)[1]
    if row and row[2] == ARGV[1] then acked = acked + redis.call('XACK', stream, ARGV[2], ARGV[i]) end
  end
  return { 'OK', acked }
end

local replies, at = {}, 3
for key = 1, #KEYS, 3 do
  if ARGV[at + 2] ~= '0' then can_write('XACK', KEYS[key], 'ZREM', KEYS[key + 2]) end
  at = at + 3 + ARGV[at + 1] + ARGV[at + 2]
end
at = 3
for key = 1, #KEYS, 3 do
  local last, parked = at + 2 + ARGV[at + 1], tonumber(ARGV[at + 2])
  replies[#replies + 1] = settle(KEYS[key], KEYS[key + 1], KEYS[key + 2], ARGV[at], at + 3, last, parked)
  at = last + 1 + parked
end
return replies
