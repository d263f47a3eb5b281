-- PURPOSE  Read what is retained under a topic name.
-- KEYS     1 retained hash
-- ARGV     1 topic name
-- RETURNS  its stamp and envelope, or nil
-- WHY      As a script call it shares a write with those of other clients that subscribe.
return redis.call('HGET', KEYS[1], ARGV[1])
