#!lua flags=allow-oom
-- PURPOSE  Note that messages which were read have not started and will not soon: their owner keeps only their ids.
-- KEYS     1 stream  2 lease hash  3 dead-letter stream
-- ARGV     1 owner  2 epoch  3 group  4 number of the call:int  5 trims:0|1 (the topic removes entries itself when it is
--          full)  6 keep:int, of dead letters  7..18 a lost body's dlq.* fields  19.. stream ids
-- RETURNS  {'OK', {lost id...}, {trimmed id...}}, {'LATE'} (this call, or a later one, was executed before) or
--          {'STALE_EPOCH'}
-- WHY      XREADGROUP counts a delivery, which may have started. A count of 0 says that it did not: so it is no suspect
--          when its owner dies. A call that comes after a later one, of this script or of read_again, does nothing:
--          it would hide the start of a message that kills. XCLAIM drops a message whose entry was deleted without a
--          trace, so that becomes a dead letter in the same step, unless the topic has trimmed it: a hundred thousand
--          of these would push all others out. One that was not pending has its dead letter, by a call without an
--          answer: how many XCLAIM drops says so, and if that were only some of those without an entry, all of them get
--          one. What is not pending and has its entry is left to the audit.
-- USES     bury_lost, count_call, order, may_write, can_write
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
local pending = redis.call('XPENDING', KEYS[1], ARGV[3])[1]
can_write('HSET', KEYS[2], 'XCLAIM XACK', KEYS[1], 'XADD', KEYS[3])
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local first = order(oldest and oldest[1] or '0-0')
if not count_call(KEYS[2], ARGV[2], ARGV[4]) then return { 'LATE' } end
local lost, trimmed = {}, {}
for from = 19, #ARGV, 500 do
  local last = math.min(from + 499, #ARGV)
  local page, claimed = { unpack(ARGV, from, last) }, {}
  for _, option in ipairs({ 'RETRYCOUNT', 0, 'JUSTID' }) do page[#page + 1] = option end
  local taken = redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, unpack(page))
  if #taken <= last - from then
    local before = pending
    pending = redis.call('XPENDING', KEYS[1], ARGV[3])[1]
    for _, id in ipairs(taken) do claimed[id] = true end
    for i = from, last do
      local id = ARGV[i]
      if not claimed[id] and #redis.call('XRANGE', KEYS[1], id, id) == 0 then
        if ARGV[5] == '1' and (not oldest or order(id) < first) then
          trimmed[#trimmed + 1] = id
        else
          if pending < before then bury_lost(KEYS[3], ARGV[6], id, unpack(ARGV, 7, 18)) end
          lost[#lost + 1] = id
        end
        redis.call('XACK', KEYS[1], ARGV[3], id)
      end
    end
  end
end
return { 'OK', lost, trimmed }
