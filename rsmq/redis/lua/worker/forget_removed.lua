-- PURPOSE  Forget notes on messages that retention has removed.
-- KEYS     1 stream  2 zset of stream ids by their ms  3.. hashes whose fields are stream ids
-- ARGV     1 count:int (fields of each hash to look at, about)
-- RETURNS  forgotten:int
-- WHY      A note lives as long as its message. Both halves of an id may exceed the 53 bits of a number, so ids are
--          compared as text.
-- USES     order
local forgotten, first = 0, nil
if redis.call('EXISTS', KEYS[2]) == 1 then
  local entry = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  local until_ms = entry and '(' .. entry[1]:match('^%d+') or '+inf'
  forgotten = redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', until_ms)
end
for index = 3, #KEYS do
  if redis.call('HLEN', KEYS[index]) > 0 then
    local entry = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
    first = first or entry and order(entry[1]) or 'none'
    local cursor, seen = '0', 0
    repeat
      local page = redis.call('HSCAN', KEYS[index], cursor, 'COUNT', 500)
      cursor, seen = page[1], seen + #page[2] / 2
      for i = 1, #page[2], 2 do
        local id = order(page[2][i])
        if id and (first == 'none' or id < first) then
          forgotten = forgotten + redis.call('HDEL', KEYS[index], page[2][i])
        end
      end
    until cursor == '0' or seen > tonumber(ARGV[1])
  end
end
return forgotten
