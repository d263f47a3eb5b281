-- packet ids of stored letters that a seq up to `most` would have, too: of those that are a round of 65 535 older
local function taken_ids(inbox, most)
  if most <= 65535 then return nil end
  local taken, old = {}, redis.call('ZRANGEBYSCORE', inbox, '-inf', most - 65535)
  assert(#old < 65535, 'every packet id is in use')
  for _, ref in ipairs(old) do taken[(tonumber(ref) or 0) % 65535] = true end
  return taken
end
