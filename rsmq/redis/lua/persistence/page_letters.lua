#!lua flags=allow-oom
-- PURPOSE  Read the next letters of an inbox for its session.
-- KEYS     1 messages zset  2 session hash  3 expiry zset
-- ARGV     1 epoch  2 after_seq:int  3 count:int  4 bytes:int (read on until so many are reached)  5 inbox_ttl_ms:int
--          6 what was taken from a ring, as `pushed` has it ('' = none; not given: nothing is)
-- RETURNS  {'OK', cursor, drained:0|1, then per letter: seq, envelope ('' where it was received before)}
--          or {'STALE_EPOCH'}, {'NO_SESSION'} or {'BEHIND', sent:int}
-- WHY      All letters leave through this script, bounded in number and bytes, so backlog and live traffic cannot race.
--          A drained inbox is marked idle in the same step, so that the next letter sends a wake-up and none is missed.
--          Only a letter takes that mark away: a late repeat of an older page must not. A cursor above all that was
--          sent: a replica has taken over that did not have the newest writes, and gives these seqs a second time.
--          A message of MQTT that has an expiry (flag 8) and is sent to its client does not expire any more.
--          A reference that is no seq is of another client: it is removed with the dead ones.
-- USES     whole, count_up, remove_dead, may_write, seq_of_push, taken_push
local state = redis.call('HMGET', KEYS[2], 'epoch', 'sent', 'until_ms', 'held', 'floor',
  unpack(ARGV[6] and { 'pushed' } or {}))
if state[1] ~= ARGV[1] then return { state[1] and 'STALE_EPOCH' or 'NO_SESSION' } end
local pushed = state[6] or ''
local sent = math.max(whole(state[2]) or 0, whole(state[5]) or 0, taken_push(pushed, ARGV[6]))
if tonumber(ARGV[2]) > sent then return { 'BEHIND', sent } end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local count, budget, bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), 0
local refs = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[2], '+inf', 'LIMIT', 0, count)
local held = {}
for each in (state[4] or ''):gmatch('%d+') do held[each] = true end
local reply, dead, started, looked, room = { 'OK', ARGV[2], 0 }, {}, {}, 0, 1
while looked < #refs and bytes < budget do
  local names, first = {}, looked
  for i = 1, math.min(room, #refs - looked) do
    names[i] = KEYS[1] .. '_' .. refs[looked + i]
  end
  for i, envelope in ipairs(redis.call('MGET', unpack(names))) do
    local ref = refs[first + i]
    if not envelope and held[ref] then envelope = '' end
    if envelope and whole(ref) then
      local kind, flags = envelope:byte(15, 16)
      if kind == 254 and flags % 16 > 8 and tonumber(ref) > sent then
        started[#started + 1] = ref
      end
      reply[#reply + 1] = ref
      reply[#reply + 1] = envelope
      bytes = bytes + #envelope
    else
      dead[#dead + 1] = ref
    end
    looked = looked + 1
    if whole(ref) then reply[2] = ref end
    if bytes >= budget then break end
  end
  room = math.min(50, math.floor(looked * (budget - bytes) / (bytes + 1)) + 1) -- more at once, if they are small
end
if looked == #refs and looked < count then reply[3] = 1 end

local is_renewed = (whole(state[3]) or 0) < now + ARGV[5]
may_write('HSET', KEYS[2])
if is_renewed or #started > 0 then may_write('PEXPIREAT', KEYS[1]) end
if #dead + #started > 0 then
  redis.call('ZCARD', KEYS[3]) -- ends the call if it is of another type
  may_write('ZREM', KEYS[1], 'ZREM', KEYS[3], 'HINCRBY', KEYS[2])
end
for _, ref in ipairs(started) do
  redis.call('PEXPIREAT', KEYS[1] .. '_' .. ref, now + ARGV[5])
  redis.call('ZREM', KEYS[3], ref)
end
remove_dead(KEYS[1], KEYS[2], KEYS[3], dead)
local changes = { 'seen_ms', string.format('%.0f', now) }
local function change(field, value) changes[#changes + 1], changes[#changes + 2] = field, value end
local newest = math.max(tonumber(reply[2]), taken_push(pushed, ARGV[6]))
if newest > (whole(state[2]) or 0) then change('sent', string.format('%.0f', newest)) end
if pushed ~= '' and seq_of_push(pushed) <= newest then change('pushed', '') end
if reply[3] == 1 then change('idle', '1') end
if is_renewed then
  local till = now + ARGV[5] + math.floor(ARGV[5] / 64)
  change('until_ms', string.format('%.0f', till))
  for i = 1, 3 do redis.call('PEXPIREAT', KEYS[i], till) end
end
redis.call('HSET', KEYS[2], unpack(changes))
return reply
