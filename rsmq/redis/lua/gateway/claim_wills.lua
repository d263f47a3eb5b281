-- PURPOSE  Take wills that are due, so that this gateway publishes them.
-- KEYS     1 wills zset (due_ms -> epoch:client)
-- ARGV     1 count:int  2 hidden_ms:int
-- RETURNS  each will that is due
-- WHY      A will stays here until it is published. A gateway that takes one and dies leaves it to the next one, a
--          little later. If it comes twice, its message id is the same, so it is stored once.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
local later = string.format('%.0f', now + ARGV[2])
for _, each in ipairs(due) do
  redis.call('ZADD', KEYS[1], later, each)
end
return due
