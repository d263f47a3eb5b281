-- remembers a given id (see given_id): `at` is the stream id of its message, or `due` is when it will be in the stream
local function remember_id(given, at, due, now)
  local life = string.format('%.0f', (due and math.max(0, due - now) or 0) + given.window)
  redis.call('SET', KEYS[given.at], due and string.format('%.0f', due) or at, 'PX', life)
  if given.last > given.at then redis.call('SET', KEYS[given.last], '@' .. KEYS[1]:match('(%d+)}'), 'PX', life) end
end
