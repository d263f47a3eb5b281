-- removes letters that are too many, and counts them: first the expired, then the oldest, never those in the middle of
-- a handshake; at most 1000 of each, so that a call stays short. Returns how many were dropped, and how many had
-- expired. Uses `count_in`
local function make_room(total, inbox, session, expiry, over, now)
  local expired, held, nheld, old, names = 0, {}, 0, {}, {}
  local gone = redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, 1000)
  if #gone > 0 then
    redis.call('ZREM', expiry, unpack(gone))
    expired = redis.call('ZREM', inbox, unpack(gone))
    count_in(total, session, 'expired', expired)
  end
  over = math.min(over - expired, 1000)
  if over <= 0 then return 0, expired end
  for ref in (redis.call('HMGET', session, 'held')[1] or ''):gmatch('%d+') do
    held[ref], nheld = true, nheld + 1
  end
  for _, ref in ipairs(redis.call('ZRANGE', inbox, 0, over + nheld - 1)) do
    if not held[ref] and #old < over then
      old[#old + 1] = ref
      names[#old] = inbox .. '_' .. ref
    end
  end
  if #old == 0 then return 0, expired end
  local dropped = redis.call('DEL', unpack(names))
  redis.call('ZREM', inbox, unpack(old))
  redis.call('ZREM', expiry, unpack(old))
  count_in(total, session, 'dropped', dropped)
  count_in(total, session, 'expired', #old - dropped)
  return dropped, expired + #old - dropped
end
