-- PURPOSE  Note that a callback of a batch, which waited for a worker, is stored.
-- KEYS     1 state hash  2 due zset
-- ARGV     1 home  2 on_complete|on_success
-- RETURNS  'OK' or 'GONE'
-- WHY      Until then it is published again, under the same message id. The state is kept from now on.
-- USES     batch_keys, may_write, can_write
if not batch_keys(KEYS[1]:match('^(.-):{'), ARGV[1]) then return 'GONE' end
can_write('HDEL', KEYS[1], 'ZADD', KEYS[2])
local time = redis.call('TIME')
redis.call('HDEL', KEYS[1], 'pending|' .. ARGV[2])
local kept = redis.call('HGET', KEYS[1], 'keep_ms') + time[1] * 1000
redis.call('ZADD', KEYS[2], string.format('%.0f', kept), ARGV[1])
return 'OK'
