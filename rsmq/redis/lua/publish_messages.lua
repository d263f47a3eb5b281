-- PURPOSE  Append a batch of messages to one partition.
-- KEYS     1 stream
-- ARGV     1 max_length:int (0 = no limit)  2 on_full:reject|trim
--          3 messages: one array of MessagePack, for each message n:int, n values (field, value, ...)
-- RETURNS  {stored:int, stream id of the last one or ''}; fewer than messages where the partition became full
-- WHY      One call for a whole batch costs the client a tenth of one XADD for each message, and the limit holds
--          exactly. One packed argument costs the server half of one argument for each value, and values named one by
--          one, for the two usual layouts, cost less than unpack().
local call, stream, max, trim = redis.call, KEYS[1], tonumber(ARGV[1]), ARGV[2] == 'trim'
local stored, id, at, room = 0, '', 1, math.huge
local m = cmsgpack.unpack(ARGV[3])
if max > 0 and not trim then room = max - call('XLEN', stream) end
while m[at] and stored < room do
  local n = m[at]
  if max > 0 and trim then
    id = call('XADD', stream, 'MAXLEN', '~', max, '*', unpack(m, at + 1, at + n))
  elseif n == 6 then
    id = call('XADD', stream, '*', m[at + 1], m[at + 2], m[at + 3], m[at + 4], m[at + 5], m[at + 6])
  elseif n == 4 then
    id = call('XADD', stream, '*', m[at + 1], m[at + 2], m[at + 3], m[at + 4])
  else
    id = call('XADD', stream, '*', unpack(m, at + 1, at + n))
  end
  stored, at = stored + 1, at + n + 1
end
return { stored, id }
