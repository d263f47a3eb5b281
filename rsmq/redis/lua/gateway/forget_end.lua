-- PURPOSE  Forget when the session of a connection that has ended expires: it goes on with a newer connection.
-- KEYS     1 sessions zset (expires_ms -> epoch:client)
-- ARGV     1 epoch:client
-- RETURNS  1, or 0: it was not noted, or has expired
-- WHY      An entry that stays does no harm: it names the epoch of a connection that is not the last one any more.
return redis.call('ZREM', KEYS[1], ARGV[1])
