-- the last seq of an inbox whose session was lost, but its letters were not: that of the newest letter
local function last_seq(inbox, session)
  local last = redis.call('ZREVRANGE', inbox, 0, 0)[1]
  redis.call('HSET', session, 'sent', last)
  return last
end
