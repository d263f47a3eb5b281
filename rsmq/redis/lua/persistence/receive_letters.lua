#!lua flags=allow-oom
-- PURPOSE  Record that the device has received these letters but has not completed their handshake (QoS 2).
-- KEYS     1 messages zset  2 session hash  3 expiry zset
-- ARGV     1 epoch  2.. seqs
-- RETURNS  {'OK', held:int}, {'STALE_EPOCH'}, {'NO_SESSION'} or {'BEHIND', sent:int}
-- WHY      From here on only the packet id matters: the envelope is deleted, and the reference stays until the
--          acknowledgement, even if letters expire or the inbox overflows. Half of all packet ids stay free for new
--          letters. A seq above all that was sent has been lost by the server: see ack_letters.
-- USES     whole, may_write
local state = redis.call('HMGET', KEYS[2], 'epoch', 'held', 'floor', 'sent')
if state[1] ~= ARGV[1] then return { state[1] and 'STALE_EPOCH' or 'NO_SESSION' } end
local held, known, floor = {}, {}, whole(state[3]) or 0
for each in (state[2] or ''):gmatch('%d+') do
  held[#held + 1] = each
  known[each] = true
end
may_write('DEL', KEYS[1], 'ZREM', KEYS[3], 'HSET', KEYS[2])
local is_listed = redis.call('ZCARD', KEYS[3]) > 0
local sent = math.max(floor, whole(state[4]) or 0)
for i = 2, #ARGV do
  if tonumber(ARGV[i]) > sent then return { 'BEHIND', sent } end
end
for i = 2, #ARGV do
  if #held < 32767 and tonumber(ARGV[i]) > floor and not known[ARGV[i]] and redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    held[#held + 1] = ARGV[i]
    known[ARGV[i]] = true
    redis.call('DEL', KEYS[1] .. '_' .. ARGV[i])
    if is_listed then redis.call('ZREM', KEYS[3], ARGV[i]) end
  end
end
redis.call('HSET', KEYS[2], 'held', table.concat(held, ','))
return { 'OK', #held }
