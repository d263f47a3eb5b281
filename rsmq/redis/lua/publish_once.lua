-- PURPOSE  Append one message unless a message with its id was appended before.
-- KEYS     1 stream  2 dedup string of this message id
-- ARGV     1 max_length:int  2 on_full:reject|trim  3 window_ms:int  4 since:stream id or ''  5 message id  6.. field, value, ...
-- RETURNS  {'OK'|'DUPLICATE', stream id} or {'FULL'}
-- WHY      A reply can be lost after the write. `since` (the newest id known before that write) lets the call find a
--          first attempt that went through the plain batch script and left no dedup key.
local known = redis.call('GET', KEYS[2])
if known then return { 'DUPLICATE', known } end
if ARGV[4] ~= '' then
  for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '(' .. ARGV[4], '+', 'COUNT', 10000)) do
    for i = 1, #entry[2], 2 do
      if entry[2][i] == 'id' and entry[2][i + 1] == ARGV[5] then
        redis.call('SET', KEYS[2], entry[1], 'PX', ARGV[3])
        return { 'DUPLICATE', entry[1] }
      end
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
return { 'OK', id }
