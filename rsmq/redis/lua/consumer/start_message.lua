-- PURPOSE  Charge an attempt to a redelivered message, just before its handler starts.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 cancels hash  5 cancelled zset
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 stream id  5 attempts charged so far:int
--          6 must_be_due:0|1 (1: the owner has no timer for its retry)
-- RETURNS  {'OK'}, {'STALE_EPOCH'}, {'NOT_PENDING'}, {'CANCELLED'}, {'NOT_DUE', wait_ms} or
--          {'LOST_BODY', is_pending:0|1} (its entry was deleted)
-- WHY      The server counts deliveries; a message that a dying process had only prefetched must not be charged for it.
--          Under a lease only the owner settles: a message that is no longer pending lost its entry when the consumer
--          was deleted, and the owner makes it pending again. Under shared distribution that cannot be known. XCLAIM
--          drops a message whose entry was deleted from the pending list, so that is checked first: it stays pending
--          until its dead letter is written. A message that is cancelled does not start: the caller settles it so. It is
--          parked no more, also not under the count of the server: a failover may have lost an earlier start.
--          So is a member of a batch that is cancelled.
--          A retry that was taken over behind an earlier message of its key has no timer, and may have been rescheduled.
-- USES     follow_clock, may_write, can_write, batch_field, is_batch_cancelled
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], ARGV[4], 1)[1]
if row and row[2] ~= ARGV[1] or not row and ARGV[2] == '' then return { 'NOT_PENDING' } end
if redis.call('HGET', KEYS[4], ARGV[4]) or redis.call('ZSCORE', KEYS[5], ARGV[4]) then return { 'CANCELLED' } end
local entry = redis.call('XRANGE', KEYS[1], ARGV[4], ARGV[4])[1]
if not entry then return { 'LOST_BODY', row and 1 or 0 } end
if is_batch_cancelled(KEYS[4], entry) then return { 'CANCELLED' } end
may_write('XCLAIM', KEYS[1])
can_write('ZADD ZREM', KEYS[3], 'HSET', KEYS[2])
local parked = ARGV[4] .. '|' .. (row and row[4] or ARGV[5])
if ARGV[6] == '1' and redis.call('ZSCORE', KEYS[3], parked) then
  local now = follow_clock(KEYS[2], KEYS[3])
  local wait = redis.call('ZSCORE', KEYS[3], parked) - now
  if wait > 0 then return { 'NOT_DUE', math.ceil(math.min(wait, 1e15)) } end
end
redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, ARGV[4], 'RETRYCOUNT', ARGV[5] + 1, 'FORCE', 'JUSTID')
redis.call('ZREM', KEYS[3], ARGV[4] .. '|' .. ARGV[5], parked)
return { 'OK' }
