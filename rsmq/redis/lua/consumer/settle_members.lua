-- PURPOSE  Acknowledge handled messages as settle_messages does, some of which are members of batches, and count these.
-- KEYS     1 stream  2 lease hash  3 retry zset  and so on, three for each partition
-- ARGV     1 owner  2 group  then for each partition: epoch, count:int, retried:int, members:int, so many stream ids, so
--          many members of the retry zset, and so many members of batches: under a lease a field `batch` for each block,
--          with all its numbers; in shared distribution the field of each message, '' for a message of none
-- RETURNS  for each partition {'OK', acknowledged:int} or {'STALE_EPOCH'}
-- WHY      Under a lease only the owner settles, so all that it names has been handled: it counts also if its consumer
--          was deleted, and twice is once. In shared distribution what another member has by now does not count here.
--          The batches are counted once for the whole call.
-- USES     may_write, can_write, batch_keys, fire_batch, count_batch, leave_batch
local function settle(stream, lease, retry, epoch, first, last, parked, members, leaving)
  local acked, from = 0, last + parked + 1 - first
  if epoch ~= '' then
    local holder = redis.call('HMGET', lease, 'owner', 'epoch')
    if holder[1] ~= ARGV[1] or holder[2] ~= epoch then return { 'STALE_EPOCH' } end
    for i = first, last, 1000 do
      acked = acked + redis.call('XACK', stream, ARGV[2], unpack(ARGV, i, math.min(i + 999, last)))
    end
    for i = last + 1, last + parked do redis.call('ZREM', retry, ARGV[i]) end
    for i = last + parked + 1, last + parked + members do leaving[#leaving + 1] = { ARGV[i], 'done', '' } end
    return { 'OK', acked }
  end
  for i = first, last do
    local row = redis.call('XPENDING', stream, ARGV[2], ARGV[i], ARGV[i], 1)[1]
    if row and row[2] == ARGV[1] and redis.call('XACK', stream, ARGV[2], ARGV[i]) == 1 then
      acked = acked + 1
      if members > 0 and ARGV[i + from] ~= '' then leaving[#leaving + 1] = { ARGV[i + from], 'done', '' } end
    end
  end
  return { 'OK', acked }
end

local replies, leaving, at = {}, {}, 3
for key = 1, #KEYS, 3 do
  can_write('XACK', KEYS[key], 'ZREM', KEYS[key + 2])
  at = at + 4 + ARGV[at + 1] + ARGV[at + 2] + ARGV[at + 3]
end
at = 3
for key = 1, #KEYS, 3 do
  local last, parked, members = at + 3 + ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  replies[#replies + 1] =
    settle(KEYS[key], KEYS[key + 1], KEYS[key + 2], ARGV[at], at + 4, last, parked, members, leaving)
  at = last + 1 + parked + members
end
leave_batch(KEYS[1], ARGV[2], leaving)
return replies
