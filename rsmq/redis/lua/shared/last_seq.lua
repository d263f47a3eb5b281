-- the last seq of an inbox; when its session was lost, but its letters were not, that of the newest letter
local function last_seq(inbox, session, last, size)
  if last or size == 0 then return last end
  last = redis.call('ZREVRANGE', inbox, 0, 0)[1]
  redis.call('HSET', session, 'sent', last)
  return last
end
