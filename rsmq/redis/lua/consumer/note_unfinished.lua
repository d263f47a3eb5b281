-- PURPOSE  Note which sealed partitions of a topic a group has not finished, if nothing else was noted meanwhile.
-- KEYS     1 group hash
-- ARGV     1 the note that was read ('' = none)  2 the new one
-- RETURNS  the note that is there now
-- WHY      Several members find at the same time that their partitions are finished: none may undo what another one notes.
local found = redis.call('HGET', KEYS[1], 'unfinished') or ''
if found ~= ARGV[1] then return found end
redis.call('HSET', KEYS[1], 'unfinished', ARGV[2])
return ARGV[2]
