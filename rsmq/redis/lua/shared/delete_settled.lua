-- deletes a page of entries, behind one id and below another, that no group has pending and that are not parked, and the
-- `notes` of each group about them (errors hash, cancels hash, cancelled zset). `parked` are ids, `many` the retry zsets
-- that were not read, each with the most attempts of those in it. Returns how many it has deleted, how many it has left
-- there, the last id that it has looked at, and whether there may be another page. Uses `order`, `is_parked`
local function delete_settled(stream, groups, notes, parked, many, from, cut)
  local lookups = 0
  for _, most in pairs(many) do lookups = lookups + most + 1 end
  local page_size = math.max(1, math.floor(5000 / (5 + lookups))) -- a few ms
  local function is_waiting(id)
    if parked[id] then return true end
    for retry, most in pairs(many) do
      if is_parked(retry, id, most) then return true end
    end
    return false
  end
  local function forget(errors, cancels, cancelled, gone)
    if redis.call('EXISTS', cancels, cancelled) > 0 then
      redis.call('HDEL', cancels, unpack(gone))
      redis.call('ZREM', cancelled, unpack(gone))
    end
    if redis.call('EXISTS', errors) == 0 then return end
    redis.call('HDEL', errors, unpack(gone))
    local past = {}
    for i, id in ipairs(gone) do past[i] = id .. '|past' end
    redis.call('HDEL', errors, unpack(past))
  end
  local deleted, left, seen, bytes, size = 0, 0, 0, 0, math.min(16, page_size)
  while seen < page_size and bytes < 1000000 do
    local page = redis.call('XRANGE', stream, '(' .. from, '(' .. cut, 'COUNT', size)
    if #page == 0 then return deleted, left, from, 0 end
    local last, is_short, needed, gone = page[#page][1], false, {}, {}
    for _, name in ipairs(groups) do
      local rows = redis.call('XPENDING', stream, name, page[1][1], last, #page)
      for _, row in ipairs(rows) do needed[row[1]] = true end
      if #rows == #page then -- there may be more, of deleted entries
        last, is_short = rows[#rows][1], true
      end
    end
    for _, entry in ipairs(page) do
      local id = entry[1]
      if is_short and order(last) < order(id) then break end
      seen = seen + 1
      for _, part in ipairs(entry[2]) do bytes = bytes + #part end
      if needed[id] or is_waiting(id) then left = left + 1 else gone[#gone + 1] = id end
    end
    if #gone > 0 then
      deleted = deleted + redis.call('XDEL', stream, unpack(gone))
      for _, name in ipairs(groups) do
        local errors, cancels, cancelled = unpack(notes[name])
        forget(errors, cancels, cancelled, gone)
      end
    end
    local fitting = math.floor((1000000 - bytes) * seen / math.max(1, bytes))
    from, size = last, math.max(1, math.min(2 * size, 500, page_size, fitting))
  end
  return deleted, left, from, 1
end
