-- PURPOSE  What somebody else has done to a partition: entries removed since a group last asked, entries read.
-- KEYS     1 stream  2 removed hash
-- ARGV     1 group  2 owner
-- RETURNS  {removed:int, last delivered id, lowest id still there or to come, highest id that XDEL has removed,
--          pending with others than the owner:int}
-- WHY      XTRIM, XADD MAXLEN and XDEL take undelivered and pending entries without a word to anybody. The server knows
--          how many were ever added and how many are there; retention notes in `own` what it has taken itself.
--          An owner takes over all that is pending before it reads: what others have then was read without a lease.
--          The first time nothing is reported: what was before is nobody's news.
local function dict(flat)
  local out = {}
  for i = 1, #flat, 2 do out[flat[i]] = flat[i + 1] end
  return out
end
local stream, delivered, pending = dict(redis.call('XINFO', 'STREAM', KEYS[1])), '0-0', 0
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = dict(row)
  if group.name == ARGV[1] then delivered, pending = group['last-delivered-id'], group.pending end
end
local known = redis.call('HMGET', KEYS[2], 'own', 'seen|' .. ARGV[1])
local gone = stream['entries-added'] - stream.length - (known[1] or 0)
local seen = tonumber(known[2])
if gone ~= seen then redis.call('HSET', KEYS[2], 'seen|' .. ARGV[1], string.format('%.0f', gone)) end
local first = stream.length > 0 and stream['first-entry'][1] or stream['last-generated-id']
local astray = 0
for _, row in ipairs(pending > 0 and redis.call('XPENDING', KEYS[1], ARGV[1])[4] or {}) do
  if row[1] ~= ARGV[2] then astray = astray + row[2] end
end
return { seen and math.max(0, gone - seen) or 0, delivered, first, stream['max-deleted-entry-id'], astray }
