#!lua flags=allow-oom
-- PURPOSE  End the connection of an MQTT client: its session is kept for a while, and its will waits for its delay.
-- KEYS     1 session hash  2 messages zset  3 expiry zset  4 received hash  5 will hash
-- ARGV     1 epoch  2 session expiry in seconds  3 life_ms:int  4 keep the will:0|1
-- RETURNS  {'OK' or 'STALE_EPOCH', delay of the will in seconds (-1 = there is none)}
-- WHY      The will has the epoch of its connection, so it is found also when the client has connected again: whether
--          that drops it was decided there. DISCONNECT may have raised the session expiry, so the keys live longer. A
--          will without a delay that can be read is due at once: who publishes it sees whether it is one.
--          A connection that was cut off before its session began leaves none.
-- USES     whole, may_write
local will, state = redis.call('HGET', KEYS[5], ARGV[1]), redis.call('HMGET', KEYS[1], 'epoch', 'until_ms', 'mqtt')
for i = 1, 4 do may_write('PEXPIREAT', KEYS[i]) end
may_write('HDEL HSET', KEYS[1], 'HDEL PEXPIRE', KEYS[5])
local delay = -1
if will and ARGV[4] == '0' then
  redis.call('HDEL', KEYS[5], ARGV[1])
elseif will then
  delay = math.min(whole(will:match('^(%d+)|')) or 0, tonumber(ARGV[2]))
  redis.call('PEXPIRE', KEYS[5], string.format('%.0f', (delay + 86400) * 1000))
end
if state[1] ~= ARGV[1] then return { 'STALE_EPOCH', delay } end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HDEL', KEYS[1], 'gateway', 'connected_ms', 'idle')
redis.call('HSET', KEYS[1], 'seen_ms', string.format('%.0f', now), unpack(state[3] and { 'mqtt', ARGV[2] } or {}))
local till = string.format('%.0f', now + ARGV[3])
if (whole(state[2]) or 0) < tonumber(till) then
  redis.call('HSET', KEYS[1], 'until_ms', till)
  for i = 1, 4 do
    redis.call('PEXPIREAT', KEYS[i], till)
  end
end
return { 'OK', delay }
