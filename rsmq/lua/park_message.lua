#!lua flags=allow-oom
-- PURPOSE  Put a failed message aside until its next attempt is due.
-- KEYS     1 stream  2 lease hash  3 retry zset
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 stream id  5 attempts charged so far:int  6 delay_ms:int
--          7 keep_pending:0|1
-- RETURNS  {'OK', due_ms}, {'STALE_EPOCH'} or {'NOT_PENDING'}
-- WHY      Without key order the pending list holds only what is in hand, so the message is acknowledged in the same
--          call. With key order it stays pending, so that the next owner meets it in its place. The owner of the
--          partition parks also what is not pending any more: somebody has deleted our consumer.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], ARGV[4], 1)[1]
if row and row[2] ~= ARGV[1] or not row and ARGV[2] == '' then return { 'NOT_PENDING' } end
if not row then
  if redis.call('ZSCORE', KEYS[3], ARGV[4] .. '|' .. ARGV[5]) then return { 'NOT_PENDING' } end
  local claim = { 0, ARGV[4], 'RETRYCOUNT', ARGV[5], 'FORCE', 'JUSTID' }
  if #redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], unpack(claim)) == 0 then return { 'NOT_PENDING' } end
end
local time = redis.call('TIME')
local due = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[6])
redis.call('ZADD', KEYS[3], due, ARGV[4] .. '|' .. ARGV[5])
if ARGV[7] == '0' then redis.call('XACK', KEYS[1], ARGV[3], ARGV[4]) end
return { 'OK', due }
