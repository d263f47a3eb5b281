-- a message whose id was given, as a relay says it, 'n first count window_ms': its values, where the id is remembered (the
-- second of these in the partition of the id, as in publish_once), for how long, and whether it was stored before
local function given_id(text)
  local n, first, count, window = text:match('^(%d+) (%d+) (%d+) (%d+)$')
  local own, other = KEYS[tonumber(first)], count == '2' and KEYS[tonumber(first) + 1]
  return tonumber(n), { own, other, tonumber(window) }, redis.call('EXISTS', own, other or own) > 0
end
