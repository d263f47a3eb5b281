-- PURPOSE  Begin or resume the MQTT session of a client, after its connection has taken the inbox.
-- KEYS     1 session hash  2 received hash  3 messages zset  4 will hash
-- ARGV     1 epoch  2 clean:0|1  3 session expiry in seconds  4 margin_ms:0|1  5 its will ('' = none)
-- RETURNS  {'OK', present:0|1, floor, leftover:int, drained:0|1, {epoch and text of each will to publish now; or
--          'published' and the head of one that has just been},
--          then packet id and value of each QoS 2 message that is not released}
--          or {'STALE_EPOCH'}
-- WHY      An inbox may exist without a session: letters were sent to a client that has never connected. A client
--          closes its connection if CONNACK names a session that it does not know, so the session has its own field.
--          A clean start comes here when the old subscriptions are removed: what was published until now, and may
--          still be on its way to this inbox, is refused by since_ms. With the margin, what was published in this very
--          millisecond, too: a caller that has removed subscriptions waits that long before it answers its client.
--          A will that waits for its delay is dropped when the session goes on. With a clean start, the old session
--          ends here, so its will is published. The hash is written anew, so that it loses its TTL. Where there is no
--          session, a clean start may have been cut off: what it has left of the old one is no part of this one.
--          An inbox without letters is marked idle, as a page that finds none would do.
--          Without `gateway` another gateway has ended this connection already: it would not find the will. A will and a
--          packet id under a name that is no number are of another client: they are dropped.
-- USES     whole, whole_or, may_write
local state = redis.call('HMGET', KEYS[1], 'epoch', 'mqtt', 'seq', 'floor', 'gateway')
if state[1] ~= ARGV[1] or not state[5] then return { 'STALE_EPOCH' } end
local left, size = redis.call('HGETALL', KEYS[2]), redis.call('ZCARD', KEYS[3])
local old, due, wills = redis.call('HGETALL', KEYS[4]), {}, {}
may_write('HSET', KEYS[1], 'DEL HDEL', KEYS[2], 'DEL HSET', KEYS[4])
local present, floor = state[2] and ARGV[2] == '0' and 1 or 0, whole_or(state[4], '0')
if present == 0 then
  redis.call('DEL', KEYS[2])
  left = {}
end
if ARGV[2] == '1' then
  floor = whole_or(state[3], '0')
  redis.call('HSET', KEYS[1], 'floor', floor, 'held', '')
end
if ARGV[2] == '1' or ARGV[4] == '1' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('HSET', KEYS[1], 'since_ms', string.format('%.0f', now + ARGV[4]))
end
local drained = size == 0 and 1 or 0
redis.call('HSET', KEYS[1], 'mqtt', ARGV[3], unpack(drained == 1 and { 'idle', '1' } or {}))

for i = 1, #old, 2 do
  if old[i] == 'published' then
    due[#due + 1] = old[i]
    due[#due + 1] = old[i + 1]
  elseif whole(old[i]) and old[i] ~= ARGV[1] and (present == 0 or old[i + 1]:sub(1, 2) == '0|') then
    due[#due + 1] = old[i]
    due[#due + 1] = old[i + 1]
    wills[#wills + 1] = old[i]
    wills[#wills + 1] = old[i + 1]
  end
end
if ARGV[5] ~= '' then
  wills[#wills + 1] = ARGV[1]
  wills[#wills + 1] = ARGV[5]
end
if #old > 0 then redis.call('DEL', KEYS[4]) end
if #wills > 0 then redis.call('HSET', KEYS[4], unpack(wills)) end

local leftover = drained == 1 and 0 or redis.call('ZCOUNT', KEYS[3], '-inf', floor)
local reply = { 'OK', present, floor, leftover, drained, due }
for i = 1, #left, 2 do
  if whole(left[i]) then
    reply[#reply + 1], reply[#reply + 2] = left[i], left[i + 1]
  else
    redis.call('HDEL', KEYS[2], left[i])
  end
end
return reply
