-- acknowledges a message; whether that was done, and its outputs are to be stored; `consumer`: only if it is that one's.
-- `retry`: where it may still be parked, because a failover has lost its start. On a first call a message that is not
-- pending lost its consumer, unless the group was created again
local function acknowledge(stream, group, id, consumer, is_first, retry)
  if consumer then
    local row = redis.call('XPENDING', stream, group, id, id, 1)[1]
    return row and row[2] == consumer and redis.call('XACK', stream, group, id) == 1
  end
  local row = retry and redis.call('XPENDING', stream, group, id, id, 1)[1]
  if row then redis.call('ZREM', retry, id .. '|' .. row[4]) end
  if redis.call('XACK', stream, group, id) == 1 then return true end
  for _, row in ipairs(is_first and redis.call('XINFO', 'GROUPS', stream) or {}) do
    local found = dict(row)
    local entry = found.name == group and redis.call('XRANGE', stream, id, found['last-delivered-id'], 'COUNT', 1)[1]
    if entry and entry[1] == id then return true end
  end
  return false
end
