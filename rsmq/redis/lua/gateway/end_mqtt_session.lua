-- PURPOSE  Remove the session of an MQTT client with its letters, a chunk at a time.
-- KEYS     1 messages zset  2 session hash  3 expiry zset  4 received hash
-- ARGV     1 epoch  2 count:int
-- RETURNS  {'OK', left:int} or {'STALE_EPOCH'}
-- WHY      The session has the epoch of the connection that ended, unless the client has connected again since: then
--          it stays. A large inbox is removed in bounded steps, and the epoch only with the last of them.
local epoch = redis.call('HGET', KEYS[2], 'epoch')
if not epoch then return { 'OK', 0 } end
if epoch ~= ARGV[1] then return { 'STALE_EPOCH' } end
local refs, names = redis.call('ZRANGE', KEYS[1], 0, ARGV[2] - 1), {}
for i, ref in ipairs(refs) do
  names[i] = KEYS[1] .. '_' .. ref
end
if #refs > 0 then
  redis.call('UNLINK', unpack(names))
  redis.call('ZREM', KEYS[1], unpack(refs))
end
local left = redis.call('ZCARD', KEYS[1])
if left == 0 then redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4]) end
return { 'OK', left }
