#!lua flags=allow-oom
-- PURPOSE  Raise the floor of an inbox, and remove a chunk of the letters at or below it.
-- KEYS     1 messages zset  2 session hash  3 expiry zset
-- ARGV     1 floor:int (0: leave it)  2 count:int
-- RETURNS  {'OK', removed:int, left:int}
-- WHY      A large inbox is cleared in bounded steps. The caller names the floor, so a repeated call does not remove
--          letters that arrived meanwhile: they are above it and stay, and so do their handshakes. A floor above the
--          newest letter (of an inbox that was lost in between) would hide the letters to come.
-- USES     whole, may_write
local state = redis.call('HMGET', KEYS[2], 'floor', 'seq', 'held')
local floor = whole(state[1]) or 0
local raised, held = math.min(tonumber(ARGV[1]), whole(state[2]) or 0), {}
local is_raised = raised > floor
if is_raised then floor = raised end
local refs, names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', floor, 'LIMIT', 0, ARGV[2]), {}
local is_listed = redis.call('ZCARD', KEYS[3]) > 0
may_write('HSET', KEYS[2], 'UNLINK ZREM', KEYS[1], 'ZREM', KEYS[3])
if is_raised then
  for each in (state[3] or ''):gmatch('%d+') do
    if tonumber(each) > floor then held[#held + 1] = each end
  end
  redis.call('HSET', KEYS[2], 'floor', string.format('%.0f', floor), 'held', table.concat(held, ','))
end
if #refs == 0 then return { 'OK', 0, 0 } end
for i, ref in ipairs(refs) do
  names[i] = KEYS[1] .. '_' .. ref
end
redis.call('UNLINK', unpack(names))
redis.call('ZREM', KEYS[1], unpack(refs))
if is_listed then redis.call('ZREM', KEYS[3], unpack(refs)) end
return { 'OK', #refs, redis.call('ZCOUNT', KEYS[1], '-inf', floor) }
