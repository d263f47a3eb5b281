-- how many permits a member gets that keeps some and wants others, how many it may hold, and how many others wait. `room`
-- is what others do not hold. `held` and `waits` are of the others: {permits} and {wanted, since}
local function divide_permits(limit, room, member, since, kept, wanted, held, waits)
  local members, before, all, waiting = 1, 0, 0, 0
  for other, each in pairs(held) do
    if each[1] > 0 and not waits[other] then members = members + 1 end
  end
  for _ in pairs(waits) do members, waiting = members + 1, waiting + 1 end
  local part = math.max(1, math.floor(limit / members))
  for other, each in pairs(waits) do
    local lacks = math.min(each[1], math.max(0, part - (held[other] and held[other][1] or 0)))
    all = all + lacks
    if each[2] < since or each[2] == since and other < member then before = before + lacks end
  end
  local free = math.max(0, room - kept)
  local granted = math.min(wanted, math.max(0, part - kept), math.max(0, free - before))
  granted = granted + math.min(wanted - granted, math.max(0, free - granted - all))
  local lacking, least = all - (free - granted), limit < members and 0 or part
  if lacking <= 0 or kept <= least or granted > 0 then return granted, limit, waiting end
  local above = 1
  for _, each in pairs(held) do
    if each[1] > least then above = above + 1 end
  end
  return granted, math.max(least, kept - math.ceil(lacking / above)), waiting
end
