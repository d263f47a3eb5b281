-- PURPOSE  Append a batch of messages under their original ids, except those that are already in the stream.
-- KEYS     1 stream
-- ARGV     1 max_length:int  2 on_full:reject|trim  then per message: stream id, n:int, n values (field, value, ...)
-- RETURNS  {'OK'|'FULL', appended:int, skipped:int}; a message without room and those after it count as neither
--          {'FOREIGN', appended, skipped, id} at an id that is older than the newest entry but not in the stream
-- WHY      The id makes the call idempotent: the server refuses an id that is not newer than its newest entry. A topic
--          that trims itself may have trimmed the front of an earlier call: what is older than its oldest entry is
--          skipped, because it would be trimmed at once. Both halves of an id may exceed the 53 bits of a number, so they
--          are compared as text.
-- USES     order, may_write, can_write
local max, trim = tonumber(ARGV[1]), ARGV[2] == 'trim'
local function is_trimmed(id)
  if max == 0 or not trim or redis.call('XLEN', KEYS[1]) < max then return false end
  return order(id) < order(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1][1])
end
can_write('XADD XTRIM', KEYS[1])
local room = math.huge
if max > 0 and not trim then room = max - redis.call('XLEN', KEYS[1]) end
local appended, skipped, at = 0, 0, 3
while at <= #ARGV do
  local id, n = ARGV[at], tonumber(ARGV[at + 1])
  local reply = { err = 'no room' }
  if appended < room then reply = redis.pcall('XADD', KEYS[1], id, unpack(ARGV, at + 2, at + n + 1)) end
  if not reply.err then
    appended = appended + 1
  elseif #redis.call('XRANGE', KEYS[1], id, id) > 0 then
    skipped = skipped + 1
  elseif reply.err == 'no room' then
    return { 'FULL', appended, skipped }
  elseif is_trimmed(id) then
    skipped = skipped + 1
  elseif reply.err:find('equal or smaller', 1, true) then
    return { 'FOREIGN', appended, skipped, id }
  else
    return reply
  end
  at = at + n + 2
end
if max > 0 and trim then redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', max) end
return { 'OK', appended, skipped }
