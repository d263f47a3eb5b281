-- a message whose id was given, as a relay says it, 'n first count window_ms': the number of its values, where in KEYS the
-- id is remembered (a second key is in the partition of the id, as in publish_once), for how long; and whether it was
-- stored before
local function given_id(text)
  local n, first, count, window = text:match('^(%d+) (%d+) (%d+) (%d+)$')
  local given = { at = tonumber(first), last = first + count - 1, window = tonumber(window) }
  local is_taken = redis.call('EXISTS', KEYS[given.at]) + redis.call('EXISTS', KEYS[given.last]) > 0
  return tonumber(n), given, is_taken
end
