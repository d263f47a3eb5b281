-- PURPOSE  End batches whose time is over, and delete the state of those that were kept long enough.
-- KEYS     1 due zset  2 names hash
-- ARGV     1 limit:int
-- RETURNS  {home, on_complete|on_success, topic and partition as `topic.partition`, payload, keep_ms}... of callbacks that
--          wait for the caller: on a cluster, where their topic is in another slot
-- WHY      The first time of a batch is its `expires`: then it calls, whether it is complete or not, closed or not. From
--          its callback on it is when its state goes. Any worker may call this, several at once, and again. What
--          another client has written into a batch stops no other one: it is looked at again after an hour.
-- USES     batch_keys, fire_batch, may_write, can_write
can_write('ZREM ZADD', KEYS[1], 'HDEL', KEYS[2])
local time, reply = redis.call('TIME'), {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local prefix = KEYS[1]:match('^(.-):{')
for _, home in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[1])) do
  local keys = batch_keys(prefix, home)
  local ended, keep, name = unpack(keys and redis.call('HMGET', keys.state, 'ended_ms', 'keep_ms', 'name') or {})
  local is_waiting = false
  if keys then can_write('UNLINK', keys.state, 'UNLINK', keys.members) end
  local is_broken = keys and not ended and not pcall(function() fire_batch(keys, true) end)
  for _, which in ipairs(keys and { 'on_complete', 'on_success' } or {}) do
    local data, to = unpack(redis.call('HMGET', keys.state, 'pending|' .. which, which))
    if data and to then
      reply[#reply + 1] = { home, which, to:match('{(.*)}$'), data, keep }
      is_waiting = true
    end
  end
  if is_waiting or is_broken then
    redis.call('ZADD', KEYS[1], string.format('%.0f', now + (is_broken and 3600000 or 1000)), home)
  elseif not keys or ended then
    if name and redis.call('HGET', KEYS[2], name) == home then redis.call('HDEL', KEYS[2], name) end
    if keys then redis.call('UNLINK', keys.state, keys.members) end
    redis.call('ZREM', KEYS[1], home)
  end
end
return reply
