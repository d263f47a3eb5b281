-- adds {wait, count} of starts to a reply: not more than `burst` at once, the others an interval apart. `even` is the moment
-- from which starts were granted so; those that are given back unused move it back. Returns it, and how many were granted
local function even_starts(reply, used, now, ahead, left, free, interval, burst, even, unused)
  local given, at = 0, 1
  even = even - unused * interval
  while left > given and given < 1000 do
    local wait = math.max(0, even - (burst - 1) * interval - now)
    while used[at] and (used[at][1] <= now + wait or free <= 0) do
      wait, free, at = math.max(wait, used[at][1] - now), free + used[at][2], at + 1
    end
    if free <= 0 or wait > ahead then break end
    even = math.max(even, now + wait) + interval
    wait = math.ceil(wait)
    if reply[#reply - 1] == wait and #reply > 2 then
      reply[#reply] = reply[#reply] + 1
    else
      reply[#reply + 1], reply[#reply + 2] = wait, 1
    end
    free, given = free - 1, given + 1
  end
  return even, given
end
