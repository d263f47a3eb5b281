-- PURPOSE  Charge an attempt to a redelivered message, just before its handler starts.
-- KEYS     1 stream  2 lease hash  3 retry zset
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 stream id  5 attempts charged so far:int
-- RETURNS  {'OK'}, {'STALE_EPOCH'} or {'NOT_PENDING'}
-- WHY      The server counts deliveries; a message that was only prefetched by a dying process must not pay for it.
--          Under a lease nobody else settles: what is not pending any more is in hand because somebody has deleted our
--          consumer, and the owner of the partition takes it back. A sharer cannot know that.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], ARGV[4], 1)[1]
if row and row[2] ~= ARGV[1] or not row and ARGV[2] == '' then return { 'NOT_PENDING' } end
local claimed = redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, ARGV[4], 'RETRYCOUNT', ARGV[5] + 1, 'FORCE', 'JUSTID')
if not row and #claimed == 0 then return { 'NOT_PENDING' } end
redis.call('ZREM', KEYS[3], ARGV[4] .. '|' .. ARGV[5])
return { 'OK' }
