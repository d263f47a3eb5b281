-- PURPOSE  Change the layout of a topic, if it is still the one that the caller has read.
-- KEYS     1 topic hash
-- ARGV     1 the layout that was read ('' = none)  2 the new one  3 what `partitions` becomes, or none
-- RETURNS  'OK', 'CHANGED' (another one is there) or 'GONE' (the topic is not there)
-- WHY      Two that change it at the same time would each undo what the other has added. Numbers of partitions that were
--          given once belong to nothing else.
local found = redis.call('HMGET', KEYS[1], 'partitions', 'layout')
if not found[1] then return 'GONE' end
if (found[2] or '') ~= ARGV[1] then return 'CHANGED' end
redis.call('HSET', KEYS[1], 'layout', ARGV[2], 'partitions', ARGV[3] or found[1])
return 'OK'
