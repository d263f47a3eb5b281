#!lua flags=allow-oom
-- PURPOSE  Settle a message that is cancelled and was not handled.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 cancels hash  5 cancelled zset
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 stream id
-- RETURNS  {'OK'}, {'STALE_EPOCH'} or {'NOT_PENDING'}
-- WHY      One call acknowledges it and notes that it was cancelled, so it is never neither. Only the owner calls this,
--          for what it does not start any more, so it is never both. A second call finds it done.
--          What is a member of a batch leaves it with this call, and who waits for its result hears of it.
-- USES     may_write, can_write, take_notes, keep_failure, batch_field, batch_keys, fire_batch, count_batch, leave_batch, end_cancelled
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], ARGV[4], 1)[1]
if ARGV[2] == '' and (not row or row[2] ~= ARGV[1]) then return { 'NOT_PENDING' } end
can_write('XACK', KEYS[1], 'ZREM', KEYS[3], 'HDEL', KEYS[4], 'ZADD', KEYS[5])
local entry = redis.call('XRANGE', KEYS[1], ARGV[4], ARGV[4])[1]
redis.call('XACK', KEYS[1], ARGV[3], ARGV[4])
if row then redis.call('ZREM', KEYS[3], ARGV[4] .. '|' .. row[4]) end
end_cancelled(KEYS[1], ARGV[3], ARGV[4], entry, KEYS[4], KEYS[5])
return { 'OK' }
