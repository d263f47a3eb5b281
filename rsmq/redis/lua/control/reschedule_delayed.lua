#!lua flags=allow-oom
-- PURPOSE  Give a delayed message another due time.
-- KEYS     1 delayed zset  2 dedup string of its message id
-- ARGV     1 packed entry  2 due:ms since 1970, or '+ms' from the server's now  3 window_ms:int
-- RETURNS  {'OK', due_ms} or {'GONE'} (it has become due meanwhile, or was cancelled)
-- WHY      Only what is still delayed moves: a message is never stored twice. Its dedup string names the new due time.
-- USES     delay_score
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return { 'GONE' } end
local time, due = redis.call('TIME'), tonumber(ARGV[2])
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2]:sub(1, 1) == '+' then due = now + due end
local text = string.format('%.0f', due)
redis.call('ZADD', KEYS[1], delay_score(KEYS[1], due), ARGV[1])
redis.call('SET', KEYS[2], text, 'PX', string.format('%.0f', math.max(0, due - now) + ARGV[3]))
return { 'OK', text }
