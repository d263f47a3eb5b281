#!lua flags=allow-oom
-- PURPOSE  Give a lease back at once.
-- KEYS     1 lease hash  2 stream
-- ARGV     1 owner  2 epoch  3 group
-- RETURNS  'OK' or 'STALE_EPOCH'
-- WHY      The epoch stays: the next owner's must be greater. The consumer goes, unless something is pending for it.
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return 'STALE_EPOCH' end
redis.call('HSET', KEYS[1], 'owner', '', 'until_ms', '0', 'reader', '')
local pending = redis.pcall('XPENDING', KEYS[2], ARGV[3], '-', '+', 1, ARGV[1])
if not pending.err and #pending == 0 then redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[3], ARGV[1]) end
return 'OK'
