-- the uses of a rate as pairs of their end and number, in order. What was not used after all (less than 0) is taken off, of
-- those that end first. Returns also how much of that there was too much
local function uses_of(counts)
  local used, returned = {}, 0
  for at, number in pairs(counts) do
    if number > 0 then used[#used + 1] = { at, number } else returned = returned - number end
  end
  table.sort(used, function(a, b) return a[1] < b[1] end)
  for _, each in ipairs(used) do
    local part = math.min(each[2], returned)
    each[2], returned = each[2] - part, returned - part
  end
  return used, returned
end
