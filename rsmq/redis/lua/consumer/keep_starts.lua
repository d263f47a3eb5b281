#!lua flags=allow-oom
-- PURPOSE  Leave to the next owner of a partition when the messages of its keys have started (a rate by key).
-- KEYS     1 lease hash
-- ARGV     1 owner  2 epoch  3 text, or '' for none
-- RETURNS  'OK' or 'STALE_EPOCH'
-- WHY      Only the owner knows them. They are times, so what an earlier owner has left does no harm.
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return 'STALE_EPOCH' end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], 'starts')
else
  redis.call('HSET', KEYS[1], 'starts', ARGV[3])
end
return 'OK'
