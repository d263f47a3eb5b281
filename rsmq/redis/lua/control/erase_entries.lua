#!lua flags=allow-oom
-- PURPOSE  Delete entries of a partition that no group will handle any more, the notes on their failures, and what their
--          handlers have kept: steps, progress and results.
-- KEYS     1 stream  2 removed hash  then for each group: retry zset, errors hash, cancels hash
-- ARGV     1 groups:int  that many names, then stream ids
-- RETURNS  {erased:int, left:int} (of these a group has one in its hands, will retry it, or has not read it and no mark
--          cancels it)
-- WHY      A pending entry that is deleted becomes a dead letter, with the text of its error. So it goes only when all
--          groups are done with it, and that is checked where it is deleted: a group may read at any time. One that was
--          made meanwhile is not in ARGV, so nothing is deleted, and the caller asks again. The entries count as removed
--          by rsmq, not by others.
--          A member of a batch that its group has not read, and that a mark cancels, leaves the batch with this call.
-- USES     dict, order, find_parked, whole, may_write, can_write, take_notes, batch_field, batch_keys, fire_batch, count_batch, leave_batch
local number, groups, rows = tonumber(ARGV[1]), {}, redis.pcall('XINFO', 'GROUPS', KEYS[1])
for i = 1, number do groups[ARGV[i + 1]] = i end
for _, row in ipairs(rows.err and {} or rows) do
  if not groups[dict(row).name] then return { 0, #ARGV - 1 - number } end
end
can_write('XDEL', KEYS[1], 'HSET', KEYS[2])
for i = 1, number do can_write('HDEL', KEYS[3 * i + 1]) end
local function waits(id)
  for _, row in ipairs(rows.err and {} or rows) do
    local group = dict(row)
    local first = 3 * groups[group.name]
    if #redis.call('XPENDING', KEYS[1], group.name, id, id, 1) > 0 then return true end
    if redis.call('EXISTS', KEYS[first]) == 1 and find_parked(KEYS[first], id, nil, 1000) then return true end
    if order(id) > order(group['last-delivered-id']) and not redis.call('HGET', KEYS[first + 2], id) then return true end
  end
end
local erased, left = 0, 0
for i = 2 + number, #ARGV do
  if waits(ARGV[i]) then
    left = left + 1
  else
    local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
    local member = entry and batch_field(entry[2])
    for _, row in ipairs(member and not rows.err and rows or {}) do
      local group = dict(row)
      if order(ARGV[i]) > order(group['last-delivered-id']) then
        leave_batch(KEYS[1], group.name, { { member, 'cancelled', '' } })
      end
    end
    erased = erased + redis.call('XDEL', KEYS[1], ARGV[i])
    for at = 1, number do
      redis.call('HDEL', KEYS[3 * at + 1], ARGV[i], ARGV[i] .. '|past')
      take_notes(KEYS[1], ARGV[at + 1], ARGV[i])
      for f = 1, entry and #entry[2] - 1 or 0, 2 do
        local is_id = entry[2][f] == 'id'
        if is_id then redis.pcall('UNLINK', KEYS[1] .. ':' .. ARGV[at + 1] .. ':result:' .. entry[2][f + 1]) end
      end
    end
  end
end
local own = whole(redis.call('HGET', KEYS[2], 'own')) or 0
if erased > 0 then redis.call('HSET', KEYS[2], 'own', string.format('%.0f', own + erased)) end
return { erased, left }
