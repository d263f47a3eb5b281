#!lua flags=allow-oom
-- PURPOSE  Release a lease.
-- KEYS     1 lease hash  2 stream
-- ARGV     1 owner  2 epoch  3 group  4 reader whose last read may still be on its way, or ''
-- RETURNS  'OK' or 'STALE_EPOCH'
-- WHY      The epoch stays, because the next owner's must be greater. A read is not fenced by the epoch, so the next
--          owner has to cut off a reader whose read is not known to be over. The owner has cut off those before it. The
--          consumer is deleted unless it has pending messages.
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return 'STALE_EPOCH' end
redis.call('HSET', KEYS[1], 'owner', '', 'until_ms', '0', 'reader', ARGV[4], 'before', '')
local pending = redis.pcall('XPENDING', KEYS[2], ARGV[3], '-', '+', 1, ARGV[1])
if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[3], ARGV[1]) end
return 'OK'
