#!lua flags=allow-oom
-- PURPOSE  Note that the device has these letters, though it has not yet completed their handshake (QoS 2).
-- KEYS     1 messages zset  2 session hash  3 expiry zset
-- ARGV     1 epoch  2.. seqs
-- RETURNS  {'OK', held:int} or {'STALE_EPOCH'}
-- WHY      From here on only the packet id counts: the envelope goes, the reference stays until the acknowledgement,
--          whatever expires or overflows meanwhile. Half of all packet ids stay free for what is new.
local state = redis.call('HMGET', KEYS[2], 'epoch', 'held', 'floor')
if state[1] ~= ARGV[1] then return { 'STALE_EPOCH' } end
local held, known, floor = {}, {}, tonumber(state[3] or 0)
for each in (state[2] or ''):gmatch('%d+') do
  held[#held + 1] = each
  known[each] = true
end
for i = 2, #ARGV do
  if #held < 32767 and tonumber(ARGV[i]) > floor and not known[ARGV[i]] and redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    held[#held + 1] = ARGV[i]
    known[ARGV[i]] = true
    redis.call('DEL', KEYS[1] .. '_' .. ARGV[i])
    redis.call('ZREM', KEYS[3], ARGV[i])
  end
end
redis.call('HSET', KEYS[2], 'held', table.concat(held, ','))
return { 'OK', #held }
