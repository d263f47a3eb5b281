-- PURPOSE  Forget notes on messages that retention has removed.
-- KEYS     1 stream  2 zset of stream ids by their ms  3 hash whose fields begin with stream ids
-- ARGV     1 cursor ('0' = from the start)  2 count:int (look at so many fields, about)
-- RETURNS  {next cursor, forgotten:int}
-- WHY      A note lives as long as its message. The caller goes on until the cursor is '0' again, so notes behind many
--          that are kept are found, too. Both halves of an id may exceed the 53 bits of a number, so ids are compared
--          as text. The mark of a batch that is cancelled ends at its own time.
-- USES     order
if redis.call('HLEN', KEYS[3]) + redis.call('ZCARD', KEYS[2]) == 0 then return { '0', 0 } end
local forgotten, entry = 0, redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if redis.call('EXISTS', KEYS[2]) == 1 then
  local until_ms = entry and '(' .. entry[1]:match('^%d+') or '+inf'
  forgotten = redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', until_ms)
end
local page = redis.call('HSCAN', KEYS[3], ARGV[1], 'COUNT', ARGV[2])
for i = 1, #page[2], 2 do
  local id, ends = order(page[2][i]), page[2][i]:sub(1, 6) == 'batch|' and tonumber(page[2][i + 1])
  if ends and ends < redis.call('TIME')[1] * 1000 or id and (not entry or id < order(entry[1])) then
    forgotten = forgotten + redis.call('HDEL', KEYS[3], page[2][i])
  end
end
return { page[1], forgotten }
