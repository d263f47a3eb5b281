#!lua flags=no-writes
-- PURPOSE  Find the entry of a stream in which a field has a value, without sending other entries.
-- KEYS     1 stream
-- ARGV     1 field  2 value  3 start  4 end: stream ids, as for XRANGE  5 count:int (look at so many at most)
-- RETURNS  {stream id or '', start of the next call or ''}; both empty: it is not there
-- WHY      A message id has no index. Its time leaves few entries to look at, and their payloads stay in the server.
--          Steps of 100 keep large messages from filling the script's memory.
local seen, at = 0, ARGV[3]
while seen < tonumber(ARGV[5]) do
  local entries = redis.call('XRANGE', KEYS[1], at, ARGV[4], 'COUNT', 100)
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == ARGV[1] and fields[i + 1] == ARGV[2] then return { entry[1], '' } end
    end
  end
  if #entries < 100 then return { '', '' } end
  seen, at = seen + #entries, '(' .. entries[#entries][1]
end
return { '', at }
