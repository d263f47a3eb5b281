#!lua flags=allow-oom
-- PURPOSE  Take, keep or give back permits of one name: each lets a call of a handler run, over the whole group.
-- KEYS     1 string: the permits of the name  2 hash: the members that hold permits
-- ARGV     1 member  2 token of its permits:int  3 number of the call:int  4 is_first:0|1 (nothing is held under this
--          token yet)  5 limit:int  6 ttl:ms  7 patience:ms  8 permits it keeps:int  9 permits it wants beside:int
-- RETURNS  {'OK', kept:int, granted:int, it may hold no more than:int, other members that wait:int}, at last 'FOREIGN' if
--          another client has written into the key: it begins anew; {'LOST'}: its token ends; {'LATE'}: a later call
--          of the member was executed before
-- WHY      A permit lives as long as the call that has it, and is no use of a rate: it does not grow old. So it ends
--          only with its member, whose token the heartbeat renews, once for all names. Whose token has run out loses
--          its permits to who asks next, and learns it: its record is gone. A permit that others wait for is not
--          granted to a member above its part; those below theirs come in the order in which they began to wait, and
--          members above their part learn what they may hold, but for what this call grants: it is used once. With
--          fewer permits than members each waits its turn.
--          After a server has lost its last writes a member keeps what it says it holds, as far as that is free.
-- USES     permit_state, permit_token, divide_permits, may_write, can_write
local token, number = tonumber(ARGV[2]), tonumber(ARGV[3])
local limit, ttl, patience = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local kept, wanted = tonumber(ARGV[8]), tonumber(ARGV[9])
can_write('HSET HDEL PEXPIRE', KEYS[2], 'SET', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local own = permit_token(KEYS[2], ARGV[1], now)
if own and own > token or own ~= token and ARGV[4] == '0' then return { 'LOST' } end
local state, is_foreign = permit_state(redis.call('GET', KEYS[1]))
local mine = state.held[ARGV[1]]
if mine and mine[2] ~= token then mine = nil end
if mine and mine[3] >= number then return { 'LATE' } end

local held, waits, over, far, others = {}, {}, {}, {}, 0
for member, each in pairs(state.held) do
  local has, ends, text = permit_token(KEYS[2], member, now)
  if text then far[member] = text end
  if member ~= ARGV[1] and has == each[2] then
    if ends > now then
      held[member] = each
      others = others + each[1]
    elseif each[1] > 0 then
      over[#over + 1] = member
    end
  end
end
for member, each in pairs(state.waits) do
  if member ~= ARGV[1] and each[3] > now and each[3] <= now + 60000 then waits[member] = each end
end

kept = math.min(kept, math.max(mine and mine[1] or 0, limit - others))
local since = state.waits[ARGV[1]] and math.min(now, state.waits[ARGV[1]][2]) or now
local granted, most, waiting = divide_permits(limit, limit - others, ARGV[1], since, kept, wanted, held, waits)

for member, text in pairs(far) do redis.call('HSET', KEYS[2], member, text) end
for _, member in ipairs(over) do redis.call('HDEL', KEYS[2], member) end
if ARGV[4] == '1' then
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f|%.0f|%.0f', token, now + ttl, ttl))
  redis.call('PEXPIRE', KEYS[2], 86400000)
end
held[ARGV[1]] = { kept + granted, token, number }
if wanted > granted then
  waits[ARGV[1]] = { wanted - granted, granted > 0 and now or since, now + patience }
end
local lifetime = others + kept + granted > 0 and 86400000 or 60000
redis.call('SET', KEYS[1], cjson.encode({ held = held, waits = waits }), 'PX', lifetime)
local reply = { 'OK', kept, granted, most, waiting }
if is_foreign then reply[#reply + 1] = 'FOREIGN' end
return reply
