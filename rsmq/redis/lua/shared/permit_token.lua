-- the token of a member's permits and its end; nil and 0 if there is none. If the clock was set back, its end is further
-- away than it was ever granted: then a nearer one, and the text of that
local function permit_token(key, member, now)
  local token, ends, length = (redis.call('HGET', key, member) or ''):match('^(%d+)|(%d+)|(%d+)$')
  if not token then return nil, 0 end
  if tonumber(ends) <= now + length + 1000 then return tonumber(token), tonumber(ends) end
  return tonumber(token), now + length, string.format('%s|%.0f|%s', token, now + length, length)
end
