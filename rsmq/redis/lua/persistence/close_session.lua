#!lua flags=allow-oom
-- PURPOSE  End the connection of a device.
-- KEYS     1 session hash
-- ARGV     1 epoch
-- RETURNS  'OK' or 'STALE_EPOCH'
-- WHY      No wake-up is sent any more for a device that is not connected. Its letters stay.
-- USES     may_write
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 'STALE_EPOCH' end
may_write('HDEL HSET', KEYS[1])
local time = redis.call('TIME')
redis.call('HDEL', KEYS[1], 'gateway', 'connected_ms', 'idle')
redis.call('HSET', KEYS[1], 'seen_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
return 'OK'
