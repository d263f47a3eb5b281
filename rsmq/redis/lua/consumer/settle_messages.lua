-- PURPOSE  Acknowledge handled messages, of one partition or of several.
-- KEYS     1 stream  2 lease hash  and so on, a pair for each partition
-- ARGV     1 owner  2 group  then for each pair: epoch ('' = shared distribution: ownership is per message),
--          count:int and that many stream ids
-- RETURNS  for each pair {'OK', acknowledged:int} or {'STALE_EPOCH'}
-- WHY      XACK does not check the owner: a process that wakes from a pause would acknowledge another member's work.
--          Each lease is checked separately: a lost one does not keep the messages of the others pending.
local function settle(stream, lease, epoch, first, last)
  local acked = 0
  if epoch ~= '' then
    local holder = redis.call('HMGET', lease, 'owner', 'epoch')
    if holder[1] ~= ARGV[1] or holder[2] ~= epoch then return { 'STALE_EPOCH' } end
    for i = first, last, 1000 do
      acked = acked + redis.call('XACK', stream, ARGV[2], unpack(ARGV, i, math.min(i + 999, last)))
    end
    return { 'OK', acked }
  end
  for i = first, last do
    local row = redis.call('XPENDING', stream, ARGV[2], ARGV[i], ARGV[i], 1)[1]
    if row and row[2] == ARGV[1] then acked = acked + redis.call('XACK', stream, ARGV[2], ARGV[i]) end
  end
  return { 'OK', acked }
end

local replies, at = {}, 3
for pair = 1, #KEYS, 2 do
  local last = at + 1 + ARGV[at + 1]
  replies[#replies + 1] = settle(KEYS[pair], KEYS[pair + 1], ARGV[at], at + 2, last)
  at = last + 1
end
return replies
