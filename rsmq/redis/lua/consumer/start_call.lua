#!lua flags=allow-oom
-- PURPOSE  Begin a call with messages of one key, whose ids their owner has kept: all of them, or none.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream  5 cancels hash  6 cancelled zset  7 calls hash
-- ARGV     1 owner  2 epoch  3 group  4 number of the call:int  5 budget:bytes (0: none)  6 trims:0|1 (the topic removes
--          entries itself when it is full)  7 keep:int, of dead letters  8..19 a lost body's dlq.* fields  20 attempt:int
--          21 key  22 end:ms of its window, 0 = do not ask  23 starts:0|1|2 (0: only what is cancelled or gone leaves, in
--          front; 2: unless it has a retry that is not due)  24 newest id that the owner has received  25 ended:int,
--          that many pairs of key and last id, then the ids
-- RETURNS  {'OK', {id, fields} or {id, word}...} up to the budget: 'CANCELLED', 'LOST' and 'TRIMMED' are settled,
--          'UNDELIVERED' is not known as delivered. Or {'BEHIND'}: messages that were stored before the end are not
--          received yet; {'NOT_DUE', wait_ms}, {'LATE'} or {'STALE_EPOCH'}
-- WHY      `calls` has the last id of the latest call of a key. What is pending up to it has started, also with a count
--          of 0, and is handled together again; what comes after it has not. So a retry has the same messages, also by
--          the next owner. Ended calls are forgotten, unless a later one has taken their place. Counts become the
--          attempt. No more than now is asked for: the clock may have been set back. To cancel the first message makes
--          it due, so that it leaves, and the others wait for a window of their own. What is deleted, cancelled, not
--          pending or not delivered is treated as by read_again. A retry behind a message whose settlement was lost
--          belongs to the same call, and has no timer.
-- USES     bury_lost, count_call, dict, follow_clock, retry_wait, order, may_write, can_write, keep_failure, take_notes, batch_field, is_batch_cancelled, batch_keys, fire_batch, count_batch, leave_batch, end_cancelled, last_delivered, kept_messages
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
may_write('HSET', KEYS[2], 'XCLAIM XACK', KEYS[1], 'ZADD ZREM', KEYS[3], 'HDEL', KEYS[5], 'ZADD', KEYS[6])
can_write('XADD', KEYS[4], 'HSET HDEL', KEYS[7])
local look, given, has_parked = kept_messages()
local time = redis.call('TIME')
local now, from = time[1] * 1000 + math.floor(time[2] / 1000), 26 + 2 * ARGV[25]
local last = math.min(tonumber(ARGV[22]), now) - 1
if ARGV[23] == '1' and last > 0 then
  local unread = redis.call('XRANGE', KEYS[1], '(' .. given, string.format('%.0f', last), 'COUNT', 1)
  local on_way = redis.call('XPENDING', KEYS[1], ARGV[3], '(' .. ARGV[24], string.format('%.0f', last), 1)
  if #unread + #on_way > 0 then return { 'BEHIND' } end
end
local wait = ARGV[23] == '2' and retry_wait(KEYS[1], ARGV[3], KEYS[2], KEYS[3], { unpack(ARGV, from) }) or 0
if wait > 0 then return { 'NOT_DUE', wait } end
if not count_call(KEYS[2], ARGV[2], ARGV[4]) then return { 'LATE' } end
for i = 26, from - 1, 2 do
  if redis.call('HGET', KEYS[7], ARGV[i]) == ARGV[i + 1] then redis.call('HDEL', KEYS[7], ARGV[i]) end
end
local reply, bytes, newest = { 'OK' }, 0, nil
for i = from, #ARGV do
  local id = ARGV[i]
  local row, entry, word = look(id)
  if word then
    reply[#reply + 1] = { id, word }
    if word == 'UNDELIVERED' then break end
  elseif ARGV[23] == '0' then
    break
  else
    if row and has_parked then redis.call('ZREM', KEYS[3], id .. '|' .. row[4]) end
    redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, id, 'RETRYCOUNT', ARGV[20], 'FORCE', 'JUSTID')
    reply[#reply + 1], newest = { id, entry[2] }, id
    for _, part in ipairs(entry[2]) do bytes = bytes + #part end
    if ARGV[5] ~= '0' and bytes > tonumber(ARGV[5]) then break end
  end
end
if newest then redis.call('HSET', KEYS[7], ARGV[21], newest) end
return reply
