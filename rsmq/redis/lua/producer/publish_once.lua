-- PURPOSE  Append one message unless a message with its id was appended before.
-- KEYS     1 stream  2 dedup string of this message id  3 the same in the partition of the id, if that is another one
-- ARGV     1 max_length:int  2 on_full:reject|trim  3 window_ms:int  4 since:stream id or ''  5 message id  6.. field, value, ...
-- RETURNS  {'OK', stream id}, {'FULL'} or {'DUPLICATE', stream id or due time of the message that is there,
--          is_same:1|0|-1 (its payload and key; -1: it is gone, or it is delayed)}
-- WHY      A reply can be lost after the write. `since` (the newest id known before that write) lets the call find a
--          first attempt that went through the plain batch script and left no dedup key. An id is one message in its
--          topic, whatever its key: on one server the partition of the id itself remembers it, too: '@' and the partition of its message.
-- USES     may_write
local function value(fields, first, name)
  for i = first, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
end

local function is_same(entry)
  if not entry then return -1 end
  for _, name in ipairs({ 'data', 'key' }) do
    if value(entry[2], 1, name) ~= value(ARGV, 6, name) then return 0 end
  end
  return 1
end

local known = redis.call('GET', KEYS[2]) or KEYS[3] and redis.call('GET', KEYS[3])
if known and (KEYS[3] and redis.call('EXISTS', KEYS[2]) == 0 or known:sub(1, 1) == '@') then
  return { 'DUPLICATE', known, 0 } -- with another key, or without one
elseif known then
  local entry = known:find('-', 1, true) and redis.call('XRANGE', KEYS[1], known, known)[1]
  return { 'DUPLICATE', known, is_same(entry) }
end
may_write('XADD', KEYS[1], 'SET', KEYS[2])
if KEYS[3] then may_write('SET', KEYS[3]) end
if ARGV[4] ~= '' then
  for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '(' .. ARGV[4], '+', 'COUNT', 10000)) do
    if value(entry[2], 1, 'id') == ARGV[5] then
      redis.call('SET', KEYS[2], entry[1], 'PX', ARGV[3])
      if KEYS[3] then redis.call('SET', KEYS[3], '@' .. KEYS[1]:match('(%d+)}'), 'PX', ARGV[3]) end
      return { 'DUPLICATE', entry[1], is_same(entry) }
    end
  end
end
local max = tonumber(ARGV[1])
local id
if max > 0 and ARGV[2] == 'trim' then
  id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(ARGV, 6))
else
  if max > 0 and redis.call('XLEN', KEYS[1]) >= max then return { 'FULL' } end
  id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 6))
end
redis.call('SET', KEYS[2], id, 'PX', ARGV[3])
if KEYS[3] then redis.call('SET', KEYS[3], '@' .. KEYS[1]:match('(%d+)}'), 'PX', ARGV[3]) end
return { 'OK', id }
