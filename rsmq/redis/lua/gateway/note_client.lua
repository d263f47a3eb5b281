-- PURPOSE  Note that an MQTT client is connected to a gateway: if that dies, the others end the connection.
-- KEYS     1 clients hash of the gateway
-- ARGV     1 client  2 epoch:session expiry:its connection as JSON
-- RETURNS  'OK', or 'GONE' (the others have ended the connections of this gateway)
-- WHY      A gateway may have been away for longer than its lease without knowing it yet. The others have read this list
--          and would not find a connection that is noted now.
if redis.call('HGET', KEYS[1], '') then return 'GONE' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 'OK'
