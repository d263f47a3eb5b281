#!lua flags=allow-oom
-- PURPOSE  Remove a chunk of what lies at or under the floor; `all` raises the floor to the newest letter first.
-- KEYS     1 messages zset  2 session hash  3 expiry zset
-- ARGV     1 all:0|1  2 count:int
-- RETURNS  {'OK', removed:int, left:int}
-- WHY      A large inbox is cleared in bounded steps, and what arrives meanwhile lies above the floor and stays.
if ARGV[1] == '1' then
  local seq = redis.call('HGET', KEYS[2], 'seq')
  if seq then redis.call('HSET', KEYS[2], 'floor', seq, 'held', '') end
end
local floor = redis.call('HGET', KEYS[2], 'floor') or '0'
local refs, names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', floor, 'LIMIT', 0, ARGV[2]), {}
if #refs == 0 then return { 'OK', 0, 0 } end
for i, ref in ipairs(refs) do
  names[i] = KEYS[1] .. '_' .. ref
end
redis.call('UNLINK', unpack(names))
redis.call('ZREM', KEYS[1], unpack(refs))
redis.call('ZREM', KEYS[3], unpack(refs))
return { 'OK', #refs, redis.call('ZCOUNT', KEYS[1], '-inf', floor) }
