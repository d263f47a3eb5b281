-- PURPOSE  How many entries of a partition somebody else has removed since a group last asked.
-- KEYS     1 stream  2 removed hash
-- ARGV     1 group
-- RETURNS  {removed:int, last delivered id, lowest id still there or to come, highest id that XDEL has removed}
-- WHY      XTRIM, XADD MAXLEN and XDEL take undelivered and pending entries without a word to anybody. The server knows
--          how many were ever added and how many are there; retention notes in `own` what it has taken itself.
--          The first time nothing is reported: what was before is nobody's news.
local function dict(flat)
  local out = {}
  for i = 1, #flat, 2 do out[flat[i]] = flat[i + 1] end
  return out
end
local stream, delivered = dict(redis.call('XINFO', 'STREAM', KEYS[1])), '0-0'
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = dict(row)
  if group.name == ARGV[1] then delivered = group['last-delivered-id'] end
end
local known = redis.call('HMGET', KEYS[2], 'own', 'seen|' .. ARGV[1])
local gone = stream['entries-added'] - stream.length - (known[1] or 0)
local seen = tonumber(known[2])
if gone ~= seen then redis.call('HSET', KEYS[2], 'seen|' .. ARGV[1], string.format('%.0f', gone)) end
local first = stream.length > 0 and stream['first-entry'][1] or stream['last-generated-id']
return { seen and math.max(0, gone - seen) or 0, delivered, first, stream['max-deleted-entry-id'] }
