#!lua flags=allow-oom
-- PURPOSE  Give parked messages whose timers the caller has the due times that are asked for.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 cancels hash  5 errors hash
-- ARGV     1 owner  2 epoch  3 group  4.. stream ids
-- RETURNS  {'OK', {attempts or -1, wait_ms}...} for each id, or {'STALE_EPOCH'}
-- WHY      The owner has stopped its timer before, and sets it anew by the reply. A second call finds no mark, and
--          answers the same: so a lost reply does no harm. What is parked no more is due.
--          The note in `errors` is for the caller: the message may start before it asks again.
-- USES     find_parked, follow_clock
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
local now, reply = follow_clock(KEYS[2], KEYS[3]), { 'OK' }
for i = 4, #ARGV do
  local id = ARGV[i]
  local row = redis.call('XPENDING', KEYS[1], ARGV[3], id, id, 1)[1]
  local attempts, due = find_parked(KEYS[3], id, row, 0)
  local asked = redis.call('HGET', KEYS[4], id .. '|due')
  if attempts and asked then
    redis.call('ZADD', KEYS[3], asked, id .. '|' .. attempts)
    redis.call('HSET', KEYS[5], id .. '|due', asked)
    due = asked
  end
  redis.call('HDEL', KEYS[4], id .. '|due')
  reply[#reply + 1] = { row and row[4] or -1, due and math.max(0, tonumber(due) - now) or 0 }
end
return reply
