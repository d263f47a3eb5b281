#!lua flags=no-writes
-- PURPOSE  Measure one partition and find its groups, without sending a payload.
-- KEYS     1 stream  2 delayed zset
-- ARGV     (none)
-- RETURNS  {entries ever added, length, delayed, {name, last delivered id, entries read, lag}, ...}; -1 is unknown
-- WHY      XINFO STREAM answers with the first and the last message, whole: a megabyte for a number, at each refresh.
local function field(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then return flat[i + 1] end
  end
end
local delayed = redis.call('ZCARD', KEYS[2])
if redis.call('EXISTS', KEYS[1]) == 0 then return { 0, 0, delayed } end
local stream = redis.call('XINFO', 'STREAM', KEYS[1])
local found = { field(stream, 'entries-added'), field(stream, 'length'), delayed }
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local lag, read = field(row, 'lag'), field(row, 'entries-read')
  if lag and not read then read = found[1] - lag end -- a new group counts from its first read on
  found[#found + 1] = { field(row, 'name'), field(row, 'last-delivered-id'), read or -1, lag or -1 }
end
return found
