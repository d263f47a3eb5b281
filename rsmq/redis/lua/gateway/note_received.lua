-- PURPOSE  Note which QoS 2 messages of a client are stored under which token, until the client releases them.
-- KEYS     1 session hash  2 received hash
-- ARGV     1 epoch  2 life_ms:int  then per change: packet id, value ('' = released)
-- RETURNS  'OK' or 'STALE_EPOCH'
-- WHY      Only the newest connection of a client may change them: an older one is refused.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 'STALE_EPOCH' end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[2], ARGV[i])
  else
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 'OK'
