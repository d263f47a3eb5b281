#!lua flags=allow-oom
-- PURPOSE  Read messages whose ids their owner has kept: their turn comes.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream  5 cancels hash  6 cancelled zset
-- ARGV     1 owner  2 epoch  3 group  4 number of the call:int  5 budget:bytes  6 trims:0|1 (the topic removes entries
--          itself when it is full)  7 keep:int, of dead letters  8..19 a lost body's dlq.* fields
--          then for each: stream id, is_first:0|1 (1: a first delivery, which was put aside)
-- RETURNS  {'OK', {id, attempts charged so far, fields} or {id, word}...} up to the budget: 'CANCELLED', 'LOST' and
--          'TRIMMED' are settled, 'UNDELIVERED' is not known as delivered. Or {'LATE'} or {'STALE_EPOCH'}
-- WHY      A first delivery gets its count of 1 back, so from here on it may have started. Others keep theirs:
--          start_message charges them. Both ways to start ask for a cancellation. What is not pending, but was
--          delivered, lost its consumer: it is made pending again. What was not delivered is above what a failover has
--          kept, and comes again: the caller gives up the lane. A deleted entry becomes a dead letter, unless the topic
--          has trimmed it: a hundred thousand of these would push all others out; if it is not even pending, a call
--          without an answer has written that. What could fail is read before anything is written.
--          A member of a batch that is cancelled is cancelled, and leaves the batch with this call.
-- USES     bury_lost, count_call, dict, order, may_write, can_write, keep_failure, take_notes, batch_field, is_batch_cancelled, batch_keys, fire_batch, count_batch, leave_batch, end_cancelled, last_delivered, kept_messages
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
can_write('HSET', KEYS[2], 'XCLAIM XACK', KEYS[1], 'ZREM', KEYS[3], 'XADD', KEYS[4], 'HDEL', KEYS[5], 'ZADD', KEYS[6])
local look = kept_messages()
if not count_call(KEYS[2], ARGV[2], ARGV[4]) then return { 'LATE' } end
local reply, bytes = { 'OK' }, 0
for i = 20, #ARGV, 2 do
  local id = ARGV[i]
  local row, entry, word = look(id)
  if word then
    reply[#reply + 1] = { id, word }
    if word == 'UNDELIVERED' then break end
  else
    local count = ARGV[i + 1] == '1' and 1 or row and row[4] or 1
    redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, id, 'RETRYCOUNT', count, 'FORCE', 'JUSTID')
    reply[#reply + 1] = { id, count, entry[2] }
    for _, part in ipairs(entry[2]) do bytes = bytes + #part end
    if bytes > tonumber(ARGV[5]) then break end
  end
end
return reply
