#!lua flags=allow-oom
-- PURPOSE  Let the members of a large group know that one of them looks at all the others.
-- KEYS     1 whether a member looks at all others
-- ARGV     1 member  2 ttl:ms
-- RETURNS  'OK'
-- WHY      Without free memory, too: without this key every member of the group would look at all the others, and a
--          look that ends with an error shows no member to be dead.
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 'OK'
