-- PURPOSE  Count entries of a stream and find the last of them, without sending their fields.
-- KEYS     1 stream
-- ARGV     1 after: stream id (exclusive)  2 upto: stream id (inclusive)  3 count:int (at most)
-- RETURNS  {found:int, id of the last one (or `after`)}
-- WHY      A reader with a limit must know the last id before it plans its tasks. Steps of 100 keep large messages from
--          filling the script's memory.
local found, last, most = 0, ARGV[1], tonumber(ARGV[3])
while found < most do
  local entries = redis.call('XRANGE', KEYS[1], '(' .. last, ARGV[2], 'COUNT', math.min(100, most - found))
  if #entries == 0 then break end
  found, last = found + #entries, entries[#entries][1]
end
return { found, last }
