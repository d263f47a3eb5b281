-- removes the references of letters that are gone from an inbox, and counts them as expired. Uses `count_up`
local function remove_dead(inbox, session, expiry, dead)
  if #dead == 0 then return end
  redis.call('ZREM', inbox, unpack(dead))
  redis.call('ZREM', expiry, unpack(dead))
  count_up(session, 'expired', #dead)
end
