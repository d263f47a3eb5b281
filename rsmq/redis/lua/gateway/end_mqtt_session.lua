#!lua flags=allow-oom
-- PURPOSE  End the session of an MQTT client, and remove its letters, a chunk at a time.
-- KEYS     1 messages zset  2 session hash  3 expiry zset  4 received hash
-- ARGV     1 epoch  2 count:int of letters to remove (0: a session that has some is ended, but stays)
-- RETURNS  {'OK', left:int} or {'STALE_EPOCH'}
-- WHY      The session has the epoch of the connection that ended, unless the client has connected again since: then
--          it stays. A large inbox is removed in bounded steps, the epoch only with the last of them. From the first
--          step on it takes no letters, so that a letter of a share which comes later is refused, and goes to another
--          member: no gateway would pass it on any more.
local epoch, count = redis.call('HGET', KEYS[2], 'epoch'), tonumber(ARGV[2])
if not epoch then return { 'OK', 0 } end
if epoch ~= ARGV[1] then return { 'STALE_EPOCH' } end
local refs, names = count > 0 and redis.call('ZRANGE', KEYS[1], 0, count - 1) or {}, {}
for i, ref in ipairs(refs) do
  names[i] = KEYS[1] .. '_' .. ref
end
if #refs > 0 then
  redis.call('UNLINK', unpack(names))
  redis.call('ZREM', KEYS[1], unpack(refs))
end
local left = redis.call('ZCARD', KEYS[1])
if left > 0 then redis.call('HSET', KEYS[2], 'mqtt', '0') else redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4]) end
return { 'OK', left }
