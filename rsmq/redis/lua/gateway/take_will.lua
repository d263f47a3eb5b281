-- PURPOSE  Read a will that is to be published now.
-- KEYS     1 will hash
-- ARGV     1 epoch
-- RETURNS  the will, or nil: it was published, or dropped
-- WHY      From now on it has no delay, so a connection that begins meanwhile does not drop it: it publishes it, too,
--          under the same message id, before its client is answered. Else it could come after what that publishes.
local will = redis.call('HGET', KEYS[1], ARGV[1])
local delay = will and will:match('^(%d+)|')
if delay and delay ~= '0' then redis.call('HSET', KEYS[1], ARGV[1], '0' .. will:sub(#delay + 1)) end
return will
