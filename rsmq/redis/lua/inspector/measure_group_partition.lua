#!lua flags=no-writes
-- PURPOSE  Read the state of one partition for one group, without sending a payload.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream  5 waits zset, or none (then what waits
--          for a time counts as well)
-- ARGV     1 group  2 last delivered id  3 limit of parked ids to read:int
-- RETURNS  {oldest pending id, oldest undelivered id, oldest parked id, parked, dead letters, owner, epoch, until_ms,
--          due ms of the first message that waits for a time, parked that are pending, consumer, pending, ...};
--          '' is none
-- WHY      One command instead of six: a refresh costs one command for each partition. And one moment: a message that
--          moves between the pending list and the retry set is in one of them. With key order it is in both, which is
--          counted among the 100 parked ones that are due next; with more it is taken to be the same share of all.
local pending = redis.call('XPENDING', KEYS[1], ARGV[1])
local due = ''
if KEYS[5] and redis.call('EXISTS', KEYS[5]) == 1 then -- of the oldest 1000 the first that may have started
  pending[2] = nil
  for _, row in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000)) do
    if row[4] > 0 and (tonumber(redis.call('ZSCORE', KEYS[5], row[1]) or 0) <= 0) then
      pending[2] = row[1]
      break
    end
  end
  -- 0 and less: its owner starts it; 1 and 2: due since an unknown moment
  due = redis.call('ZRANGEBYSCORE', KEYS[5], '(2', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2] or ''
end
local following = redis.pcall('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', 1)[1] -- an error behind the last id
local oldest, least, looked, both = '', nil, 0, 0
for _, member in ipairs(redis.call('ZRANGE', KEYS[3], 0, ARGV[3] - 1)) do
  local id = member:match('^[^|]*')
  local ms, seq = id:match('^0*(%d+)%-0*(%d+)$')
  -- both halves may exceed the 53 bits of a number, so ids are compared as text
  local order = ms and ('0'):rep(20 - #ms) .. ms .. ('0'):rep(20 - #seq) .. seq
  if order and (not least or order < least) then oldest, least = id, order end
  if order and looked < 100 then
    looked = looked + 1
    if redis.pcall('XPENDING', KEYS[1], ARGV[1], id, id, 1)[1] then both = both + 1 end
  end
end
local parked = redis.call('ZCARD', KEYS[3])
if looked > 0 then both = math.floor(parked * both / looked + 0.5) end
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch', 'until_ms')
local found = {
  pending[2] or '', following and following[1] or '', oldest,
  parked, redis.call('XLEN', KEYS[4]), lease[1] or '', lease[2] or '0', lease[3] or '0',
  due, both,
}
for _, row in ipairs(pending[4] or {}) do
  found[#found + 1] = row[1]
  found[#found + 1] = tonumber(row[2])
end
return found
