-- PURPOSE  Keep the newest retained message of a topic name, or remove it.
-- KEYS     1 retained hash  2 names zset (lexical)  3 expiries zset (expires_ms -> name)
-- ARGV     1 name  2 stamp  3 envelope without its stamp ('' = remove)  4 ttl_ms:int ('' = none)
--          5 how long a removal is remembered, in ms:int  6 limit:int  7 the stamp is the server's clock:0|1
-- RETURNS  'OK', 'OLDER' (a newer one is kept) or 'FULL'
-- WHY      The stamp is the position in the stream, so repeats and races end the same for everyone who writes. A
--          removal leaves its stamp for a while: a late write of an older message must not bring it back.
--          A message of QoS 0 is in no stream, so its stamp is the server's clock. If that was set back, it takes the
--          stamp of the message that it replaces. What has no stamp is of another client, and is replaced.
-- USES     may_write, can_write
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gone = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 20)
may_write('ZADD ZREM', KEYS[3])
can_write('HSET HDEL', KEYS[1], 'ZADD ZREM', KEYS[2])
for _, name in ipairs(gone) do
  redis.call('HDEL', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
  redis.call('ZREM', KEYS[3], name)
end
local old = redis.call('HGET', KEYS[1], ARGV[1])
local is_stamped = old and old:match('^%d+|') == old:sub(1, #ARGV[2] + 1)
if is_stamped and old:sub(1, #ARGV[2]) > ARGV[2] then
  if ARGV[7] == '0' or tonumber(old:sub(1, 20)) <= now + 1000 then return 'OLDER' end
  ARGV[2] = old:sub(1, #ARGV[2])
end
local expires = 281474976710655
if ARGV[4] ~= '' then expires = now + ARGV[4] end
if ARGV[3] == '' then
  if not old then return 'OK' end
  redis.call('ZREM', KEYS[2], ARGV[1])
  expires = now + ARGV[5]
elseif not old and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[6]) then
  return 'FULL'
else
  redis.call('ZADD', KEYS[2], 0, ARGV[1])
end
local stamp = ARGV[3] == '' and '' or struct.pack('>BI6I6', 1, now, expires)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. '|' .. stamp .. ARGV[3])
if ARGV[4] ~= '' or ARGV[3] == '' then
  redis.call('ZADD', KEYS[3], string.format('%.0f', expires), ARGV[1])
else
  redis.call('ZREM', KEYS[3], ARGV[1])
end
return 'OK'
