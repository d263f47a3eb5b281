#!lua flags=no-writes
-- PURPOSE  Read the counts of one partition and of its groups, without sending a payload.
-- KEYS     1 stream  2 delayed zset
-- ARGV     (none)
-- RETURNS  {entries ever added, length, delayed, first id, last id,
--          {group, last delivered id, entries read, lag, consumers}, ...}; -1 is unknown, '' is none
-- WHY      XINFO STREAM returns the whole first and last message: perhaps a megabyte for one number, at each refresh.
local function field(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then return flat[i + 1] end
  end
end
local delayed = redis.call('ZCARD', KEYS[2])
if redis.call('EXISTS', KEYS[1]) == 0 then return { 0, 0, delayed, '', '' } end
local stream = redis.call('XINFO', 'STREAM', KEYS[1])
local first, last = field(stream, 'first-entry'), field(stream, 'last-entry')
local found = {
  field(stream, 'entries-added'), field(stream, 'length'), delayed, first and first[1] or '', last and last[1] or '',
}
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local lag, read = field(row, 'lag'), field(row, 'entries-read')
  if lag and not read then read = found[1] - lag end -- a new group counts from its first read on
  found[#found + 1] = { field(row, 'name'), field(row, 'last-delivered-id'), read or -1, lag or -1, field(row, 'consumers') }
end
return found
