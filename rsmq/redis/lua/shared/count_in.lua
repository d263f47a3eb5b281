-- counts letters in their session, and in the totals of a call
local function count_in(total, session, field, n)
  if n > 0 then redis.call('HINCRBY', session, field, n) end
  total[field] = total[field] + n
end
