-- counts letters in their session, and in the totals of a call. Uses `count_up`
local function count_in(total, session, field, n)
  if n > 0 then count_up(session, field, n) end
  total[field] = total[field] + n
end
