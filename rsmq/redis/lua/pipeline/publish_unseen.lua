-- PURPOSE  Append a batch of messages, except those whose ids were stored within the window.
-- KEYS     1 stream  2.. dedup string of each message
-- ARGV     1 max_length:int  2 on_full:reject|trim  3 window_ms:int  then per message: n:int, n values (field, value, ...)
-- RETURNS  {'OK'|'FULL', appended:int, skipped:int}; a message without room and those after it count as neither
-- WHY      It uses the keys of `publish_once` for a whole batch in one call.
-- USES     may_write
local max, trim = tonumber(ARGV[1]), ARGV[2] == 'trim'
may_write('XADD', KEYS[1])
for i = 2, #KEYS do may_write('SET', KEYS[i]) end
local room = math.huge
if max > 0 and not trim then room = max - redis.call('XLEN', KEYS[1]) end
local appended, skipped, at, message = 0, 0, 4, 2
while at <= #ARGV do
  local n = tonumber(ARGV[at])
  if redis.call('EXISTS', KEYS[message]) == 1 then
    skipped = skipped + 1
  elseif appended >= room then
    return { 'FULL', appended, skipped }
  else
    local id
    if max > 0 and trim then
      id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(ARGV, at + 1, at + n))
    else
      id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 1, at + n))
    end
    redis.call('SET', KEYS[message], id, 'PX', ARGV[3])
    appended = appended + 1
  end
  at, message = at + n + 1, message + 1
end
return { 'OK', appended, skipped }
