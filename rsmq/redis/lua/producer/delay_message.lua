-- PURPOSE  Keep a message until it is due.
-- KEYS     1 delayed zset  2 stream  3 dedup string of this message id
--          4 the same in the partition of the id, if that is another one
-- ARGV     1 due:ms since 1970, or '+ms' from the server's now  2 window_ms:int  3 packed entry
-- RETURNS  {'OK', due_ms} or {'DUPLICATE', due_ms, is_same:1|0|-1 (payload and key; -1: it is not among the first 1 000
--          that are due then)}
-- WHY      The server's clock defines "in five seconds". A message that is sent twice is stored once.
--          A stream that takes no entries any more takes none later either: so it is asked before anything is written.
--          What is due in one millisecond comes in the order of these calls.
-- USES     dict, may_write, can_write, can_append, delay_score
local due = tonumber(ARGV[1])
if ARGV[1]:sub(1, 1) == '+' then
  local now = redis.call('TIME')
  due = now[1] * 1000 + math.floor(now[2] / 1000) + due
end
local function unpacked(packed)
  local fields, at = {}, 1
  while at <= #packed do
    local name, value
    name, at = struct.unpack('>I4c0', packed, at)
    value, at = struct.unpack('>I4c0', packed, at)
    fields[name] = value
  end
  return fields
end

local known = redis.call('GET', KEYS[3]) or KEYS[4] and redis.call('GET', KEYS[4])
if known and (KEYS[4] and redis.call('EXISTS', KEYS[3]) == 0 or known:sub(1, 1) == '@') then
  return { 'DUPLICATE', known, 0 } -- with another key, or without one
elseif known then
  local mine, is_same = unpacked(ARGV[3]), -1
  local there = not known:match('^%d+$') and {} -- in the stream, or cancelled
    or redis.call('ZRANGEBYSCORE', KEYS[1], known, '(' .. (known + 1), 'LIMIT', 0, 1000)
  for _, packed in ipairs(there) do
    local ok, fields = pcall(unpacked, packed)
    if ok and fields.id == mine.id then
      is_same = fields.data == mine.data and fields.key == mine.key and 1 or 0
    end
  end
  return { 'DUPLICATE', known, is_same }
end
can_write('ZADD', KEYS[1], 'SET', KEYS[3])
can_append(KEYS[2])
if KEYS[4] then may_write('SET', KEYS[4]) end
redis.call('ZADD', KEYS[1], delay_score(KEYS[1], due), ARGV[3])
local now = redis.call('TIME')
local left = math.max(0, due - now[1] * 1000)
local life = string.format('%.0f', left + tonumber(ARGV[2]))
redis.call('SET', KEYS[3], string.format('%.0f', due), 'PX', life)
if KEYS[4] then redis.call('SET', KEYS[4], '@' .. KEYS[1]:match('(%d+)}'), 'PX', life) end
return { 'OK', string.format('%.0f', due) }
