-- PURPOSE  Acknowledge handled messages of one partition.
-- KEYS     1 stream  2 lease hash
-- ARGV     1 owner  2 epoch ('' = shared distribution: ownership is per message)  3 group  4.. stream ids
-- RETURNS  {'OK', acknowledged:int} or {'STALE_EPOCH'}
-- WHY      XACK asks nobody who the owner is: a process that wakes from a pause would acknowledge another's work.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
  local acked = 0
  for i = 4, #ARGV, 1000 do
    acked = acked + redis.call('XACK', KEYS[1], ARGV[3], unpack(ARGV, i, math.min(i + 999, #ARGV)))
  end
  return { 'OK', acked }
end
local acked = 0
for i = 4, #ARGV do
  local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[i], ARGV[i], 1)[1]
  if row and row[2] == ARGV[1] then acked = acked + redis.call('XACK', KEYS[1], ARGV[3], ARGV[i]) end
end
return { 'OK', acked }
