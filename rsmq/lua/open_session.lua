#!lua flags=allow-oom
-- PURPOSE  Connect a device: a new epoch, which shuts out its previous connection.
-- KEYS     1 messages zset  2 session hash  3 expiry zset  4 wake channel
-- ARGV     1 gateway  2 clean:0|1  3 inbox_ttl_ms:int
-- RETURNS  {'OK', epoch, present:0|1, sent, floor, leftover:int}
-- WHY      A clean start puts the floor at the newest seq: everything up to it is gone at once and is removed in chunks
--          afterwards (`leftover`); since_ms turns away what was published before but comes late.
--          The epoch also grows when the session had expired, so that a connection of an older life stays shut out.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local text = string.format('%.0f', now)
local state = redis.call('HMGET', KEYS[2], 'epoch', 'seq', 'sent', 'floor')
local epoch = string.format('%.0f', math.max(tonumber(state[1] or 0) + 1, now))
local seq, sent, floor = state[2] or '0', state[3] or '0', state[4] or '0'
if ARGV[2] == '1' then
  floor = seq
  redis.call('HSET', KEYS[2], 'floor', floor, 'since_ms', text, 'held', '')
end
local till = now + ARGV[3] + math.floor(ARGV[3] / 64)
redis.call('HSET', KEYS[2], 'epoch', epoch, 'seq', seq, 'gateway', ARGV[1], 'connected_ms', text, 'seen_ms', text,
  'idle', '0', 'until_ms', string.format('%.0f', till))
for i = 1, 3 do
  redis.call('PEXPIREAT', KEYS[i], till)
end
redis.call('SPUBLISH', KEYS[4], '')
return { 'OK', epoch, state[1] and 1 or (state[2] and 1 or 0), sent, floor, redis.call('ZCOUNT', KEYS[1], '-inf', floor) }
