#!lua flags=allow-oom
-- PURPOSE  Park a failed message until its next attempt is due.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 errors hash
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 stream id  5 attempts charged so far:int  6 delay_ms:int
--          7 keep_pending:0|1  8 is_counted:0|1 (0: this attempt is charged no more)  9 error
-- RETURNS  {'OK', due_ms}, {'STALE_EPOCH'}, {'NOT_PENDING'} or {'LOST_BODY', is_pending:0|1}
--          (its entry was deleted)
-- WHY      Without key order the pending list holds only messages in flight, so the message is acknowledged in the same
--          call. With key order it stays pending, so that the next owner keeps its position. The owner of the partition
--          also parks a message that is no longer pending, because its consumer was deleted. There is nothing to retry
--          without the entry. The server's count of deliveries becomes the number that the parked message bears: an
--          attempt that does not count is taken off, and a failover may have lost the charge of one, or the start of a
--          retry, which is parked again then. Under another number no start would find the parked message. The error of
--          the attempt is noted for `rsmq trace` and the dead letter, of at most 10 000 messages. The most attempts of
--          all are noted for retention, which else could not find one of very many.
-- USES     follow_clock, note_failure, whole, note_charged, may_write, can_write
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], ARGV[4], 1)[1]
if row and row[2] ~= ARGV[1] or not row and ARGV[2] == '' then return { 'NOT_PENDING' } end
if row and row[4] > tonumber(ARGV[5]) then return { 'NOT_PENDING' } end -- started since: this call comes late
local charged = ARGV[5] - (ARGV[8] == '0' and 1 or 0)
local parked = ARGV[4] .. '|' .. string.format('%.0f', charged)
if not row and redis.call('ZSCORE', KEYS[3], parked) then return { 'NOT_PENDING' } end
if #redis.call('XRANGE', KEYS[1], ARGV[4], ARGV[4]) == 0 then return { 'LOST_BODY', row and 1 or 0 } end
may_write('XCLAIM XACK', KEYS[1])
can_write('HSET', KEYS[2], 'ZADD ZREM', KEYS[3], 'HSET', KEYS[4])
if not row or row[4] ~= charged then
  if row then redis.call('ZREM', KEYS[3], ARGV[4] .. '|' .. row[4]) end
  redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, ARGV[4], 'RETRYCOUNT', charged, 'FORCE', 'JUSTID')
end
local now = follow_clock(KEYS[2], KEYS[3])
local due = string.format('%.0f', now + ARGV[6])
note_charged(KEYS[2], KEYS[3], charged)
redis.call('ZADD', KEYS[3], due, parked)
if (ARGV[9] or '') ~= '' then note_failure(KEYS[4], ARGV[4], charged, now, ARGV[9]) end
if ARGV[7] == '0' then redis.call('XACK', KEYS[1], ARGV[3], ARGV[4]) end
return { 'OK', due }
