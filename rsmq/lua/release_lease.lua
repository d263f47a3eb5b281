#!lua flags=allow-oom
-- PURPOSE  Give a lease back at once.
-- KEYS     1 lease hash
-- ARGV     1 owner  2 epoch
-- RETURNS  'OK' or 'STALE_EPOCH'
-- WHY      The epoch stays: the next owner's must be greater.
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return 'STALE_EPOCH' end
redis.call('HSET', KEYS[1], 'owner', '', 'until_ms', '0', 'reader', '')
return 'OK'
