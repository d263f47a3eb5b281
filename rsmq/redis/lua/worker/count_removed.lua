-- PURPOSE  Count the entries that other clients removed since a group last asked, and those that others have read.
-- KEYS     1 stream  2 removed hash
-- ARGV     1 group  2 owner
-- RETURNS  {removed:int, last delivered id, lowest id still there or to come, highest id that XDEL has removed,
--          pending with others than the owner:int, removed ever:int}
-- WHY      XTRIM, XADD MAXLEN and XDEL remove undelivered and pending entries without any notice. The server counts the
--          entries ever added and those still there; retention records its own removals in `own`. An owner takes over
--          all pending messages before it reads, so those of other consumers were read without a lease. The first call
--          reports nothing, because it has nothing to compare with. The caller stores `removed ever` in the field
--          `seen|group` when it has reported what is new, so that a lost reply does not count as reported.
-- USES     dict, whole
local stream, delivered, pending = dict(redis.call('XINFO', 'STREAM', KEYS[1])), '0-0', 0
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = dict(row)
  if group.name == ARGV[1] then delivered, pending = group['last-delivered-id'], group.pending end
end
local known = redis.call('HMGET', KEYS[2], 'own', 'seen|' .. ARGV[1])
local gone = stream['entries-added'] - stream.length - (whole(known[1]) or 0)
local seen = whole(known[2])
if not seen or gone < seen then redis.call('HSET', KEYS[2], 'seen|' .. ARGV[1], string.format('%.0f', gone)) end
local first = stream.length > 0 and stream['first-entry'][1] or stream['last-generated-id']
local foreign = 0
for _, row in ipairs(pending > 0 and redis.call('XPENDING', KEYS[1], ARGV[1])[4] or {}) do
  if row[1] ~= ARGV[2] then foreign = foreign + row[2] end
end
return { seen and math.max(0, gone - seen) or 0, delivered, first, stream['max-deleted-entry-id'], foreign, gone }
