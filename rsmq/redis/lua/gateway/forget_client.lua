-- PURPOSE  Note that a connection of an MQTT client to a gateway has ended.
-- KEYS     1 clients hash of the gateway
-- ARGV     1 client  2 epoch
-- RETURNS  1, or 0
-- WHY      The client may have a later connection to the same gateway by now, whose entry stays.
local found = redis.call('HGET', KEYS[1], ARGV[1])
if not found or found:match('^(%d+):') ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
