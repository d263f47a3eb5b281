#!lua flags=allow-oom
-- PURPOSE  Give a message of a group that waits for a time another one.
-- KEYS     1 stream  2 waits zset  3 cancels hash  4 cancelled zset
-- ARGV     1 group  2 stream id  3 due:ms since 1970, or '+ms' from the server's now
-- RETURNS  {'OK', due_ms}, or {'NO_WAIT'}: it does not wait for a time, or starts now
-- WHY      Its owner asks for what is due before it starts anything, so what is there until then can be moved. The
--          fraction says that this time was given by hand: the handler's rule is not asked again.
-- USES     may_write, can_write
local score = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[2]) or 0)
if score <= 0 or #redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1) == 0 then return { 'NO_WAIT' } end
if redis.call('HGET', KEYS[3], ARGV[2]) or redis.call('ZSCORE', KEYS[4], ARGV[2]) then return { 'NO_WAIT' } end
can_write('ZADD', KEYS[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = ARGV[3]:sub(1, 1) == '+' and now + ARGV[3] or tonumber(ARGV[3])
due = math.max(1, math.floor(due))
redis.call('ZADD', KEYS[2], string.format('%.1f', due + 0.5), ARGV[2])
return { 'OK', string.format('%.0f', due) }
