-- moves delayed messages that are due into the stream, at most `limit` of them: how many, and whether there was no room
-- for the next. Uses `is_id`, `name_record`, `can_write`
local function release_due(stream, delayed, unique, now, limit, max, on_full)
  local function unpacked(packed)
    local fields, at = {}, 1
    while at <= #packed do
      local n
      n, at = struct.unpack('>I4', packed, at)
      if at + n - 1 > #packed then error('cut off') end
      fields[#fields + 1] = packed:sub(at, at + n - 1)
      at = at + n
    end
    if #fields == 0 or #fields % 2 == 1 or #fields > 2000 then error('not pairs') end
    return fields
  end
  local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', string.format('%.0f', now), 'LIMIT', 0, limit)
  local moved, is_full = 0, 0
  local room = #due > 0 and max > 0 and on_full ~= 'trim' and max - redis.call('XLEN', stream) or #due
  if #due > 0 then can_write('XADD', stream, 'ZREM', delayed, 'HSET', unique) end
  for _, packed in ipairs(due) do
    if moved >= room then
      is_full = 1
      break
    end
    local ok, fields = pcall(unpacked, packed)
    if not ok then fields = { 'packed', packed } end
    local args = max > 0 and on_full == 'trim' and { 'MAXLEN', '~', max, '*' } or { '*' }
    for _, field in ipairs(fields) do args[#args + 1] = field end
    local id = redis.call('XADD', stream, unpack(args))
    redis.call('ZREM', delayed, packed)
    moved = moved + 1
    local record = fields[1] == 'unique' and redis.call('HGET', unique, fields[2])
    if record then
      local till, holder, _, own = name_record(record)
      if till and own == packed then redis.call('HSET', unique, fields[2], cmsgpack.pack({ till, holder, id, '' })) end
    end
  end
  return moved, is_full
end
