-- PURPOSE  Keep a message until it is due.
-- KEYS     1 delayed zset  2 dedup string of this message id
-- ARGV     1 due:ms since 1970, or '+ms' from the server's now  2 window_ms:int  3 packed entry
-- RETURNS  {'OK'|'DUPLICATE', due_ms}
-- WHY      The server's clock defines "in five seconds". A message that is sent twice is stored once.
local due = tonumber(ARGV[1])
if ARGV[1]:sub(1, 1) == '+' then
  local now = redis.call('TIME')
  due = now[1] * 1000 + math.floor(now[2] / 1000) + due
end
local known = redis.call('GET', KEYS[2])
if known then return { 'DUPLICATE', known } end
redis.call('ZADD', KEYS[1], due, ARGV[3])
local now = redis.call('TIME')
local left = math.max(0, due - now[1] * 1000)
redis.call('SET', KEYS[2], string.format('%.0f', due), 'PX', string.format('%.0f', left + tonumber(ARGV[2])))
return { 'OK', string.format('%.0f', due) }
