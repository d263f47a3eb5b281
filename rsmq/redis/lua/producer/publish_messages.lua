-- PURPOSE  Append a batch of messages to one partition, as far as there is room.
-- KEYS     1 stream
-- ARGV     1 max_length:int (0 = no limit)  2 on_full:reject|trim  then per message: n:int, n values (field, value, ...)
-- RETURNS  {stored:int, stream id of the last one or ''}; fewer than messages where the partition became full
-- WHY      The limit holds exactly. Topics without a limit that rejects need no script.
local max, trim = tonumber(ARGV[1]), ARGV[2] == 'trim'
local stored, id, at, room = 0, '', 3, math.huge
if max > 0 and not trim then room = max - redis.call('XLEN', KEYS[1]) end
while ARGV[at] and stored < room do
  local n = tonumber(ARGV[at])
  if max > 0 and trim then
    id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(ARGV, at + 1, at + n))
  else
    id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 1, at + n))
  end
  stored, at = stored + 1, at + n + 1
end
return { stored, id }
