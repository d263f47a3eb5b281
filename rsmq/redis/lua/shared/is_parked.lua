-- whether a message is in the retry zset of a group. `most`: of the attempts that those in it were charged, which are a
-- part of the member
local function is_parked(retry, id, most)
  for attempts = 0, most do
    if redis.call('ZSCORE', retry, id .. '|' .. attempts) then return true end
  end
  return false
end
