-- PURPOSE  Keep the result of a step, or the progress, of a message whose handler runs.
-- KEYS     1 stream  2 lease hash  3 steps hash  4 progress hash
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 stream id  5 step, or '' for the progress  6 value
--          7 most:int, of steps  8 largest:int, bytes of all their results
-- RETURNS  {'OK'}, {'STALE_EPOCH'}, {'NOT_PENDING'} or {'FULL'}: nothing is kept
-- WHY      Fenced as a settlement is: a process that wakes from a pause must not write over what its successor has kept.
--          The settlement of an attempt that has kept something removes it, a dead letter takes the steps along, and
--          retention removes the rest.
-- USES     may_write, can_write
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
else
  local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], ARGV[4], 1)[1]
  if not row or row[2] ~= ARGV[1] then return { 'NOT_PENDING' } end
end
can_write('HSET', KEYS[3], 'HSET', KEYS[4])
if ARGV[5] == '' then
  redis.call('HSET', KEYS[4], ARGV[4], ARGV[6])
  return { 'OK' }
end
local names, count, size, is_known = redis.call('HGET', KEYS[3], ARGV[4]) or '', 1, #ARGV[6], false
for name in names:gmatch('[^|]+') do
  if name == ARGV[5] then
    is_known = true
  else
    count, size = count + 1, size + #(redis.call('HGET', KEYS[3], ARGV[4] .. '|' .. name) or '')
  end
end
if count > tonumber(ARGV[7]) or size > tonumber(ARGV[8]) then return { 'FULL' } end
redis.call('HSET', KEYS[3], ARGV[4] .. '|' .. ARGV[5], ARGV[6])
if not is_known then redis.call('HSET', KEYS[3], ARGV[4], names == '' and ARGV[5] or names .. '|' .. ARGV[5]) end
return { 'OK' }
