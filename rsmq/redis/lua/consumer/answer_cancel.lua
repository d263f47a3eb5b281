-- PURPOSE  Answer that a message which is to be cancelled runs.
-- KEYS     1 lease hash  2 cancels hash
-- ARGV     1 owner  2 epoch ('' = shared)  3.. stream ids
-- RETURNS  {'OK'} or {'STALE_EPOCH'}
-- WHY      The mark stays: if the attempt fails, the message is not tried again. The order to interrupt is not changed.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
for i = 3, #ARGV do
  if redis.call('HGET', KEYS[2], ARGV[i]) == 'asked' then redis.call('HSET', KEYS[2], ARGV[i], 'running') end
end
return { 'OK' }
