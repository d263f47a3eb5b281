-- In how many ms the last retry of some pending messages is due; 0: all are, or none is parked.
local function retry_wait(stream, group, lease, retry, ids)
  local wait, now = 0, follow_clock(lease, retry)
  for _, id in ipairs(ids) do
    local row = redis.call('XPENDING', stream, group, id, id, 1)[1]
    local due = row and redis.call('ZSCORE', retry, id .. '|' .. row[4])
    if due then wait = math.max(wait, due - now) end
  end
  return math.ceil(math.min(wait, 1e15))
end
