#!lua flags=no-writes
-- PURPOSE  Outline one partition: how much is in it, from where to where, for which groups.
-- KEYS     1 stream  2 delayed zset
-- ARGV     (none)
-- RETURNS  {length, first id or '', last id or '', delayed, group, ...}
-- WHY      XINFO STREAM answers with the first and the last message, whole: a megabyte for two ids.
local found = { redis.call('XLEN', KEYS[1]), '', '', redis.call('ZCARD', KEYS[2]) }
if redis.call('EXISTS', KEYS[1]) == 0 then return found end
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if first then found[2], found[3] = first[1], last[1] end
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  for i = 1, #row, 2 do
    if row[i] == 'name' then found[#found + 1] = row[i + 1] end
  end
end
return found
