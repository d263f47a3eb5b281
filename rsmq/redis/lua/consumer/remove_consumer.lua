-- PURPOSE  Delete the consumer of a dead member from a group.
-- KEYS     1 stream
-- ARGV     1 group  2 consumer
-- RETURNS  'OK' or 'HAS_PENDING'
-- WHY      XGROUP DELCONSUMER also drops the consumer's pending entries, which would be silent loss.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 'HAS_PENDING' end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 'OK'
