-- gives a message the steps that its dead letter has kept (see take_notes): a replay does not do them again. What another
-- client has written there is left out. Uses `unpacked_fields`
local function lay_steps(stream, group, id, packed)
  local steps, found, names = stream .. ':' .. group .. ':steps', packed and unpacked_fields(packed) or {}, {}
  local kind = redis.call('TYPE', steps).ok
  if kind ~= 'none' and kind ~= 'hash' then return end
  for i = 1, math.min(#found - 1, 200), 2 do
    redis.call('HSET', steps, id .. '|' .. found[i], found[i + 1])
    names[#names + 1] = found[i]
  end
  if #names > 0 then redis.call('HSET', steps, id, table.concat(names, '|')) end
end
