#!lua flags=allow-oom
-- PURPOSE  Take a block of starts from a rate over a group, and report those used since the last call.
-- KEYS     1 string: the rate of one name
-- ARGV     1 member  2 limit:int  3 per:ms  4 ahead:ms  5 hold:ms  6 starts it holds:int  7 starts it wants:int
--          8 burst:int, starts at once, the others evenly (0: no matter when)
--          then for what it has used: age:ms, count:int (less than 0: it has used less than it had said)
-- RETURNS  {starts it may still hold:int, then for each part of the block: wait:ms, count:int, at last 'FOREIGN' if
--          another client has written into the key: it begins anew}
-- WHY      A start counts from its use until `per` later. What is held may be used until `ahead` and `hold` after the
--          call, so it counts until `per` after that, unless a later call of its member says what became of it. A start
--          that becomes free within `ahead` is given in advance. When there are too few, each member that waits gets its
--          part. The calls of a member come in order: after a lost reply its batcher ends the connection first.
--          With a burst each start has its moment, a limit's part of the time after the last one.
-- USES     rate_state, uses_of, even_starts
local limit, per, ahead, hold = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local kept, wanted, step = tonumber(ARGV[6]), tonumber(ARGV[7]), math.max(1, math.floor(per / 200))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local state, is_foreign = rate_state(redis.call('GET', KEYS[1]))
local back = state.seen - now > 1000 and state.seen - now or 0 -- the clock was set back: so are all times

local counts, busy, members, held = {}, 0, 0, {}
local function count(at, number)
  if at > now then
    counts[at] = (counts[at] or 0) + number
    busy = busy + number
  end
end
for _, each in ipairs(state.used) do count(each[1] - back, each[2]) end
for member, each in pairs(state.held) do
  local starts, at, waits, seen = unpack(each)
  if at - back > now then
    held[member] = { starts, at - back, waits, seen - back }
    busy = busy + (member ~= ARGV[1] and starts or 0)
    if member ~= ARGV[1] and waits == 1 and seen - back > now - ahead then members = members + 1 end
  end
end

local mine = held[ARGV[1]]
kept = math.min(kept, mine and mine[1] or 0)
busy = busy + kept
local reported = 0
for at = 9, #ARGV, 2 do
  count(math.ceil((now + 1 - ARGV[at] + per) / step) * step, tonumber(ARGV[at + 1]))
  reported = reported + ARGV[at + 1]
end

local used, excess = uses_of(counts)
busy = busy + excess
local free = limit - busy
local soon = free
for _, each in ipairs(used) do
  if each[1] <= now + ahead then soon = soon + each[2] end
end
local left = math.min(wanted, math.ceil(math.max(0, soon) / (members + 1)))
local reply, given = { kept }, 0
local function give(wait)
  local number = math.min(left, free)
  if number > 0 then
    reply[#reply + 1], reply[#reply + 2] = wait, number
    left, free, given = left - number, free - number, given + number
  end
end
if ARGV[8] ~= '0' then
  local unused = math.max(0, (mine and mine[1] or 0) - kept - reported)
  state.even, given = even_starts(reply, used, now, ahead, left, free, per / limit, ARGV[8], (state.even or 0) - back, unused)
else
  give(0)
  for _, each in ipairs(used) do
    if each[1] > now + ahead then break end
    free = free + each[2]
    give(each[1] - now)
  end
end

local ends = now + 1 + ahead + hold + per
held[ARGV[1]] = { kept + given, ends, wanted > given and 1 or 0, now }
redis.call('SET', KEYS[1], cjson.encode({ seen = now, used = used, held = held, even = state.even }), 'PX', ends - now + 1000)
if is_foreign then reply[#reply + 1] = 'FOREIGN' end
return reply
