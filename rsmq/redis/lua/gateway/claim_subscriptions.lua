-- PURPOSE  Read the subscriptions of an MQTT client for its new connection.
-- KEYS     1 subscriptions hash
-- ARGV     1 client  2 epoch
-- RETURNS  its whole list ('' = none), or 'STALE_EPOCH'
-- WHY      The entry takes the new epoch in the same step: a change that the old connection sends late is refused.
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old then return '' end
local epoch, list = old:match('^(%d+)|(.*)$')
if tonumber(epoch) > tonumber(ARGV[2]) then return 'STALE_EPOCH' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. '|' .. list)
return list
