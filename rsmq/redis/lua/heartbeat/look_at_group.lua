#!lua flags=no-writes
-- PURPOSE  Read what a member of a large group needs at each heartbeat, while others look at all its members.
-- KEYS     1 set of member ids  2 group hash  3 whether a watcher looks at all members
-- ARGV     none, or 'layout' where the topic has more than one block of partitions
-- RETURNS  {seconds, microseconds (the server's clock), paused ('1' or ''), holds or '', members:int, watched:0|1}
--          With 'layout' then which sealed partitions the group has not finished, as it has noted it, or ''
-- WHY      A look at each of 1 000 members costs the server a millisecond, and 1 000 members ask at every heartbeat.
local time = redis.call('TIME')
local about = redis.call('HMGET', KEYS[2], 'paused', 'holds')
local found = { time[1], time[2], about[1] or '', about[2] or '', redis.call('SCARD', KEYS[1]), redis.call('EXISTS', KEYS[3]) }
if ARGV[1] then found[7] = redis.call('HGET', KEYS[2], 'unfinished') or '' end
return found
