-- the fields of a session that storing a letter needs; the last four only for a letter of an MQTT subscription
local function inbox_state(session, source, is_mqtt)
  if not is_mqtt then return redis.call('HMGET', session, 'seq', 'until_ms', 'idle', 'since_ms', source) end
  return redis.call('HMGET', session, 'seq', 'until_ms', 'idle', 'since_ms', source, 'mqtt', 'gateway', 'epoch', 'pushed')
end
