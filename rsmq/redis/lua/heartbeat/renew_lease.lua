#!lua flags=allow-oom
-- PURPOSE  Prolong a lease that the caller still holds.
-- KEYS     1 lease hash
-- ARGV     1 owner  2 epoch  3 ttl_ms:int
-- RETURNS  'OK' or 'STALE_EPOCH'
-- WHY      An expired lease that no other member has taken still belongs to its owner: after an outage the owners renew
--          it.
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return 'STALE_EPOCH' end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'until_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]))
return 'OK'
