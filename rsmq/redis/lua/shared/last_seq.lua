-- the last seq of an inbox whose session was lost, but its letters were not: that of the newest letter. Uses `whole_or`
local function last_seq(inbox, session)
  local last = whole_or(redis.call('ZREVRANGE', inbox, 0, 0)[1], '0')
  redis.call('HSET', session, 'sent', last)
  return last
end
