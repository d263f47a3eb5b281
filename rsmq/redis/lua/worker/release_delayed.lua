-- PURPOSE  Move delayed messages that are due into the stream.
-- KEYS     1 stream  2 delayed zset  3 unique hash
-- ARGV     1 limit:int  2 max_length:int (0 = no limit)  3 on_full:reject|trim
-- RETURNS  {moved:int, wait_ms:int until the next one is due (at most a day), -1 if there is none, is_full:0|1 (no room for the next)}
-- WHY      ZREM and XADD run in one script: a poller that dies loses no message and moves none twice.
--          A message that holds a unique name has it as its first field: the record of the name follows it.
--          Nothing may fail once a message is stored, or it would be stored in each round: a record that is none is
--          left to `forget_names`. A message that cannot be unpacked becomes an entry without `data`: consumers bury it as malformed.
-- USES     is_id, name_record, can_write
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
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[1])
local max, moved, is_full = tonumber(ARGV[2]), 0, 0
local room = #due > 0 and max > 0 and ARGV[3] ~= 'trim' and max - redis.call('XLEN', KEYS[1]) or #due
if #due > 0 then can_write('XADD', KEYS[1], 'ZREM', KEYS[2], 'HSET', KEYS[3]) end
for _, packed in ipairs(due) do
  if moved >= room then
    is_full = 1
    break
  end
  local ok, fields = pcall(unpacked, packed)
  if not ok then fields = { 'packed', packed } end
  local limit = max > 0 and ARGV[3] == 'trim' and { 'MAXLEN', '~', max, '*' } or { '*' }
  for _, field in ipairs(fields) do limit[#limit + 1] = field end
  local id = redis.call('XADD', KEYS[1], unpack(limit))
  redis.call('ZREM', KEYS[2], packed)
  moved = moved + 1
  local record = fields[1] == 'unique' and redis.call('HGET', KEYS[3], fields[2])
  if record then
    local till, holder, _, own = name_record(record)
    if till and own == packed then redis.call('HSET', KEYS[3], fields[2], cmsgpack.pack({ till, holder, id, '' })) end
  end
end
local next = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if #next == 0 then return { moved, -1, is_full } end
return { moved, math.min(math.max(0, tonumber(next[2]) - now), 86400000), is_full }
