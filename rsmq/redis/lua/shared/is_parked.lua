-- whether a message is in the retry zset of a group. `most`: of the attempts that those in it were charged, which are a
-- part of the member
local function is_parked(retry, id, most)
  for from = 0, most, 1000 do
    local asked = {}
    for attempts = from, math.min(most, from + 999) do asked[#asked + 1] = id .. '|' .. attempts end
    for _, due in ipairs(redis.call('ZMSCORE', retry, unpack(asked))) do
      if due then return true end
    end
  end
  return false
end
