-- remembers a given id (see given_id): `at` is the stream id of its message, or `due` is when it will be in the stream
local function remember_id(given, at, due, now)
  local life = string.format('%.0f', (due and math.max(0, due - now) or 0) + given[3])
  redis.call('SET', given[1], due and string.format('%.0f', due) or at, 'PX', life)
  if given[2] then redis.call('SET', given[2], '@' .. KEYS[1]:match('(%d+)}'), 'PX', life) end
end
