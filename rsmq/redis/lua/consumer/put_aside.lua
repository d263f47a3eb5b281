#!lua flags=allow-oom
-- PURPOSE  Note that messages which were read have not started and will not soon: their owner keeps only their ids.
-- KEYS     1 stream  2 lease hash  3 dead-letter stream
-- ARGV     1 owner  2 epoch  3 group  4 number of the call:int  5 keep:int, of dead letters  6..17 a lost body's dlq.*
--          fields  18.. stream ids
-- RETURNS  {'OK', lost id...}, {'LATE'} (this call, or a later one, was executed before) or {'STALE_EPOCH'}
-- WHY      XREADGROUP counts a delivery, which may have started. A count of 0 says that it did not: so it is no suspect
--          when its owner dies. A call that comes after a later one, of this script or of read_again, does nothing:
--          it would hide the start of a message that kills. XCLAIM drops a message whose entry was deleted without a
--          trace, so that becomes a dead letter in the same step. What is not pending is left to the audit.
-- USES     count_call, dict, can_append, can_write
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
redis.call('XPENDING', KEYS[1], ARGV[3])
can_write('HSET', KEYS[2], 'XCLAIM XACK', KEYS[1], 'XADD', KEYS[3])
can_append(KEYS[3])
if not count_call(KEYS[2], ARGV[2], ARGV[4]) then return { 'LATE' } end
local reply = { 'OK' }
for first = 18, #ARGV, 500 do
  local last = math.min(first + 499, #ARGV)
  local page, claimed = { unpack(ARGV, first, last) }, {}
  for _, option in ipairs({ 'RETRYCOUNT', 0, 'JUSTID' }) do page[#page + 1] = option end
  local taken = redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, unpack(page))
  if #taken <= last - first then
    for _, id in ipairs(taken) do claimed[id] = true end
    for i = first, last do
      if not claimed[ARGV[i]] and #redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i]) == 0 then
        redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'dlq.origin', ARGV[i], unpack(ARGV, 6, 17))
        redis.call('XACK', KEYS[1], ARGV[3], ARGV[i])
        reply[#reply + 1] = ARGV[i]
      end
    end
  end
end
return reply
