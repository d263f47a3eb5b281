-- PURPOSE  Make a topic, if it is not there.
-- KEYS     1 topic hash
-- ARGV     its fields, each with its value, without `partitions`, then what that is
-- RETURNS  1, or 0 if it is there
-- WHY      Two processes that make a topic again (FLUSHALL) may know different layouts. Field by field, one that knows none
--          could write `partitions` and the other the layout: members that read both would disagree about what it is.
if redis.call('HSETNX', KEYS[1], 'partitions', ARGV[#ARGV]) == 0 then return 0 end
for at = 1, #ARGV - 1, 2 do redis.call('HSETNX', KEYS[1], ARGV[at], ARGV[at + 1]) end
return 1
