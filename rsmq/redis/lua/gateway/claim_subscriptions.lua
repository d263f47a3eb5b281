-- PURPOSE  Read the subscriptions of an MQTT client for its new connection.
-- KEYS     1 subscriptions hash
-- ARGV     1 client  2 epoch
-- RETURNS  its whole list ('' = none), 'STALE_EPOCH', or 'FOREIGN': another client has written something else there, which
--          is as none, and is replaced
-- WHY      The entry takes the new epoch in the same step, also where there is none: a change that the old connection
--          sends late is refused.
-- USES     whole
local old = redis.call('HGET', KEYS[1], ARGV[1]) or '0|'
local epoch, left, list = old:match('^(%d+)(!?)|(.*)$')
if (whole(epoch) or 0) > tonumber(ARGV[2]) then return 'STALE_EPOCH' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. (left or '') .. '|' .. (list or ''))
return whole(epoch) and list or 'FOREIGN'
