-- PURPOSE  Pass messages of QoS 0 on to the gateways that are connected now.
-- KEYS     1 sharded channel
-- ARGV     packed messages
-- RETURNS  'OK'
-- WHY      Nothing is stored: who is not connected at this moment misses them, as QoS 0 allows.
for i = 1, #ARGV do
  redis.call('SPUBLISH', KEYS[1], ARGV[i])
end
return 'OK'
