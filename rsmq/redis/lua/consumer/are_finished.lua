-- PURPOSE  Ask whether a group has settled all messages of sealed partitions, and can get no more of them.
-- KEYS     stream of each partition  then, except on a cluster, the topic hash
-- ARGV     1 group  2 what `partitions` is after a resize, '' on a cluster  3 'read': what was delivered need not be settled
-- RETURNS  the position of the first one that is not finished, 0 if all are
-- WHY      What is left is looked at, and no position is compared with an end: a group that was made after a trim stays at
--          the start for ever. What waits for a retry is pending, as long as keys have an order. The layout says that these
--          are sealed. Where the server has lost a seal (FLUSHALL, and the topic was made again), it is sealed again: else
--          the partitions that follow would wait for ever. Not while the server has an older layout: it comes first. On a
--          cluster that is in another slot; there the one may be lost without the other, and this seal comes first.
-- USES     dict, order, may_write, can_write
local largest, first, unsealed = '18446744073709551615-18446744073709551615', 0, {}
local count = ARGV[2] == '' and #KEYS or #KEYS - 1
if ARGV[2] ~= '' and redis.call('HGET', KEYS[#KEYS], 'partitions') ~= ARGV[2] then return 1 end
for at = 1, count do
  local key = KEYS[at]
  if redis.call('EXISTS', key) == 0 then return at end -- its owner makes the group, and with it the stream
  local stream = dict(redis.call('XINFO', 'STREAM', key))
  if stream['last-generated-id'] ~= largest then
    can_write('XSETID', key)
    unsealed[#unsealed + 1] = key
  end
  local is_finished = false
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    local group = dict(row)
    if group.name == ARGV[1] then
      local last = stream['last-entry'] and stream['last-entry'][1]
      is_finished = (group.pending == 0 or ARGV[3] == 'read') and not (last and order(last) > order(group['last-delivered-id']))
    end
  end
  if not is_finished and first == 0 then first = at end
end
for _, key in ipairs(unsealed) do redis.call('XSETID', key, largest) end
return first
