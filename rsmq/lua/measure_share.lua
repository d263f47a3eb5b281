#!lua flags=no-writes
-- PURPOSE  Measure one partition as one group sees it, without sending a payload.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream
-- ARGV     1 group  2 last delivered id  3 most parked ids looked at:int
-- RETURNS  {oldest pending id, oldest undelivered id, oldest parked id, parked, dead letters, owner, epoch, until_ms,
--          consumer, pending, ...}; '' is none
-- WHY      One command in place of six, so that a refresh costs as many commands as there are partitions.
local pending = redis.call('XPENDING', KEYS[1], ARGV[1])
local following = redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', 1)[1]
local oldest, least = '', math.huge
for _, member in ipairs(redis.call('ZRANGE', KEYS[3], 0, ARGV[3] - 1)) do
  local id = member:match('^[^|]*')
  local ms = tonumber(id:match('^%d+')) or math.huge
  if ms < least then oldest, least = id, ms end
end
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch', 'until_ms')
local found = {
  pending[2] or '', following and following[1] or '', oldest,
  redis.call('ZCARD', KEYS[3]), redis.call('XLEN', KEYS[4]), lease[1] or '', lease[2] or '0', lease[3] or '0',
}
for _, row in ipairs(pending[4] or {}) do
  found[#found + 1] = row[1]
  found[#found + 1] = tonumber(row[2])
end
return found
