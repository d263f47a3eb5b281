-- PURPOSE  Renew the lease of a gateway, and find those that have been silent.
-- KEYS     1 gateways zset (until_ms -> gateway)
-- ARGV     1 gateway  2 ttl_ms:int (0 = it leaves)  3 new:0|1  4 silent_ms:int (0 = find all)
-- RETURNS  {'OK', now_ms, then each gateway that was silent for silent_ms, and until_ms of its lease}
--          or {'LOST', now_ms}
-- WHY      When a gateway was away for longer than its lease, the others may have ended its connections, and removed
--          it. This reply says so, and the gateway starts anew. After an outage of the server all leases have run out,
--          but none is removed: each gateway renews its own before the others act. All times are the server's.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local text = string.format('%.0f', now)
if ARGV[2] == '0' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return { 'OK', text }
end
if ARGV[3] == '0' and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return { 'LOST', text } end
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1])
local reply = { 'OK', text }
local silent = string.format('(%.0f', now + ARGV[2] - ARGV[4])
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', silent, 'WITHSCORES', 'LIMIT', 0, 100)
for i = 1, #found do reply[#reply + 1] = found[i] end
return reply
