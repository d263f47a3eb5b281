-- PURPOSE  Read the subscriptions of an MQTT client for its new connection.
-- KEYS     1 subscriptions hash
-- ARGV     1 client  2 epoch
-- RETURNS  its whole list ('' = none), 'STALE_EPOCH', or 'FOREIGN': another client has written something else there, which
--          is as none; the next write replaces it
-- WHY      The entry takes the new epoch in the same step: a change that the old connection sends late is refused.
-- USES     whole
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old then return '' end
local epoch, left, list = old:match('^(%d+)(!?)|(.*)$')
if not whole(epoch) then return 'FOREIGN' end
if tonumber(epoch) > tonumber(ARGV[2]) then return 'STALE_EPOCH' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. left .. '|' .. list)
return list
