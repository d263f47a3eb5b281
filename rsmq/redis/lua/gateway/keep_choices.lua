-- PURPOSE  Keep which members of shared subscriptions get the messages of a page.
-- KEYS     1 stream  2 steps hash
-- ARGV     1 group  2 field  3 most:int, of these fields before old ones are removed, then for each message:
--          stream id, what its router has read ('' = nothing), what it has chosen
-- RETURNS  for each message what is kept now: what was chosen, or what another router has kept meanwhile
-- WHY      A page is routed again if its router dies, or loses the server, before it is settled. The members may be
--          others by then, or away: a choice by them would send a message to a second member, or leave one out at a
--          member that has a later one already. So the first choice is kept before any letter is stored. The router that
--          has read something else than is kept chooses again, whichever of them is late. Once the page is settled its
--          choices are of no use: they are removed when there are many, or with retention.
-- USES     order, may_write
local names, write = {}, {}
for i = 4, #ARGV, 3 do names[#names + 1] = ARGV[i] .. '|' .. ARGV[2] end
local found = redis.call('HMGET', KEYS[2], unpack(names))
for n, name in ipairs(names) do
  local seen, chosen = ARGV[3 * n + 2], ARGV[3 * n + 3]
  found[n] = found[n] or ''
  if found[n] == seen then
    found[n], write[#write + 1], write[#write + 2] = chosen, name, chosen
  end
end
if #write == 0 then return found end
may_write('HSET HDEL', KEYS[2])
redis.call('HSET', KEYS[2], unpack(write))
if redis.call('HLEN', KEYS[2]) <= tonumber(ARGV[3]) then return found end
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 1)
local floor, old, is_of = order(pending[1] and pending[1][1] or ARGV[4]), {}, '|' .. ARGV[2]
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local name = all[i]
  local at = name:sub(-#is_of) == is_of and order(name)
  if at and floor and at < floor then old[#old + 1] = name end
end
for i = 1, #old, 1000 do redis.call('HDEL', KEYS[2], unpack(old, i, math.min(i + 999, #old))) end
return found
