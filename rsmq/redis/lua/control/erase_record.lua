#!lua flags=allow-oom
-- PURPOSE  Forget which messages of a key a group has handled together.
-- KEYS     1 stream  2 calls hash
-- ARGV     1 group  2 key
-- RETURNS  1 if there is a record that stays, because its call is not settled; else 0
-- WHY      The field is the key itself. While the last message of the call is pending, the record says what its repetition
--          has, so it stays until the next round.
-- USES     may_write, can_write
local last = redis.call('HGET', KEYS[2], ARGV[2])
if not last then return 0 end
local rows = redis.pcall('XPENDING', KEYS[1], ARGV[1], last, last, 1)
if not rows.err and #rows > 0 then return 1 end
can_write('HDEL', KEYS[2])
redis.call('HDEL', KEYS[2], ARGV[2])
return 0
