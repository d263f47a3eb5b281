#!lua flags=allow-oom
-- PURPOSE  Remove letters that the device has received, for its session.
-- KEYS     1 messages zset  2 session hash  3 expiry zset
-- ARGV     1 epoch  2.. seqs
-- RETURNS  {'OK', removed:int}, {'STALE_EPOCH'}, {'NO_SESSION'} or {'BEHIND', sent:int}
-- WHY      One call removes many letters. After another connection has taken the session over, this one removes
--          nothing. Without an epoch the server has lost the session (expired, deleted, FLUSHALL): seqs start anew
--          then, so an old one must remove nothing either. A seq above all that was sent has been lost by the server,
--          and may have been given to another letter since: then nothing is removed.
-- USES     whole, may_write
local state = redis.call('HMGET', KEYS[2], 'epoch', 'held', 'sent', 'floor')
if state[1] ~= ARGV[1] then return { state[1] and 'STALE_EPOCH' or 'NO_SESSION' } end
local names, sent = {}, math.max(whole(state[3]) or 0, whole(state[4]) or 0)
for i = 2, #ARGV do
  if tonumber(ARGV[i]) > sent then return { 'BEHIND', sent } end
  names[i - 1] = KEYS[1] .. '_' .. ARGV[i]
end
local is_listed = redis.call('ZCARD', KEYS[3]) > 0
may_write('DEL ZREM', KEYS[1])
if is_listed then may_write('ZREM', KEYS[3]) end
if state[2] and state[2] ~= '' then may_write('HSET', KEYS[2]) end
local removed = redis.call('ZREM', KEYS[1], unpack(ARGV, 2))
redis.call('DEL', unpack(names))
if is_listed then redis.call('ZREM', KEYS[3], unpack(ARGV, 2)) end
if state[2] and state[2] ~= '' then
  local acked, held = {}, {}
  for i = 2, #ARGV do
    acked[ARGV[i]] = true
  end
  for each in state[2]:gmatch('%d+') do
    if not acked[each] then held[#held + 1] = each end
  end
  redis.call('HSET', KEYS[2], 'held', table.concat(held, ','))
end
return { 'OK', removed }
