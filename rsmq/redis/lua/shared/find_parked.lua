-- the attempts that a parked message was charged, and its due time; nil if it is not parked. The attempts are a part of
-- the member, so without a row of XPENDING each number up to `most` is tried
local function find_parked(retry, id, row, most)
  for attempts = row and row[4] or 0, row and row[4] or tonumber(most) do
    local due = redis.call('ZSCORE', retry, id .. '|' .. attempts)
    if due then return attempts, due end
  end
end
