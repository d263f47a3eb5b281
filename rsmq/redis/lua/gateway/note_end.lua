-- PURPOSE  Note when the will of a connection that has ended is due, and when its session expires.
-- KEYS     1 wills zset (due_ms -> epoch:client)  2 sessions zset (expires_ms -> epoch:client)
-- ARGV     1 epoch:client  2 due_ms:int ('' = no will)  3 expires_ms:int ('' = the session ends now)
-- RETURNS  'OK'
-- WHY      Several gateways may end the same connection of a dead one. An earlier time of its will stays.
if ARGV[2] ~= '' then redis.call('ZADD', KEYS[1], 'LT', ARGV[2], ARGV[1]) end
if ARGV[3] ~= '' then redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1]) end
return 'OK'
