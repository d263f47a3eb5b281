-- adds the ids in a retry zset to a set, and returns the lowest of them, or nil. What names no entry needs none. Of more
-- than 5000 it adds none, and returns '0-0' and the most attempts that any of them was charged: -1 if that is not known,
-- or more than 1000. Uses `order`, `is_id`, `whole`
local function add_parked(parked, retry, lease)
  if redis.call('ZCARD', retry) > 5000 then
    local most = whole(redis.call('HGET', lease, 'most_charged')) or -1
    return '0-0', most <= 1000 and most or -1
  end
  local lowest
  for _, member in ipairs(redis.call('ZRANGE', retry, 0, -1)) do
    local id = member:match('^([%d-]+)|')
    if id and is_id(id) then
      parked[id] = true
      if not lowest or order(id) < order(lowest) then lowest = id end
    end
  end
  return lowest
end
