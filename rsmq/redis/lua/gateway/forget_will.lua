-- PURPOSE  Remove a will that was published.
-- KEYS     1 will hash
-- ARGV     1 epoch  2 how long it is remembered, in ms
-- RETURNS  1, or 0: it was removed before
-- WHY      Its head, without the payload, stays for a while: a client that connects meanwhile sends what it publishes to
--          this topic name the same way, on which it cannot overtake the will. A will of a newer connection is in the
--          same hash: that one has begun when this will was there.
local will = redis.call('HGET', KEYS[1], ARGV[1])
if not will then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'published', will:match('^[^\n]*'))
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
