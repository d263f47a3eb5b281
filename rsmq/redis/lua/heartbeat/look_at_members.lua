#!lua flags=no-writes
-- PURPOSE  Read a group for its members: the members, which of them have a heartbeat key, whether the group is paused,
--          what it holds, on a cluster which partitions each member cannot read, and in a topic with more than one
--          block of partitions which members say what they know of it.
-- KEYS     1 set of member ids  2 group hash  3 a heartbeat's key without the member id
-- ARGV     none, or the heartbeats' own words that are wanted: 'unreadable', 'layout'
-- RETURNS  {seconds, microseconds (the server's clock), paused ('1' or ''), holds or '', member, heartbeat:0|1, ...}
--          With 'unreadable' a heartbeat that names partitions is their numbers, such as '3,7', in place of 1
--          With 'layout' each heartbeat is followed by 1 if it says a version, else by 0, and before the first member is
--          which sealed partitions the group has not finished, as it has noted it, or ''
-- WHY      Every member asks at every heartbeat, so it is one command. It derives keys from ids that it has read, which
--          is allowed only in a script without writes; the keys have the group's hash tag, so they are in its slot.
--          Keys expire by the clock that it returns, so a jump of the clock is seen together with the keys it has
--          expired.
--          As a rule all have their keys: one EXISTS finds that, in half the time of one for each.
local time = redis.call('TIME')
local about = redis.call('HMGET', KEYS[2], 'paused', 'holds')
local found = { time[1], time[2], about[1] or '', about[2] or '' }
local wants = {}
for _, word in ipairs(ARGV) do wants[word] = true end
if wants.layout then found[5] = redis.call('HGET', KEYS[2], 'unfinished') or '' end
local members, keys = redis.call('SMEMBERS', KEYS[1]), {}
for at, member in ipairs(members) do keys[at] = KEYS[3] .. member end
local all_live = not ARGV[1]
for from = 1, #keys, 1000 do
  local to = math.min(from + 999, #keys)
  all_live = all_live and redis.call('EXISTS', unpack(keys, from, to)) == to - from + 1
end
for at, member in ipairs(members) do
  found[#found + 1] = member
  if ARGV[1] then
    local info = redis.pcall('GET', keys[at]) -- another client may have written another type
    local said = type(info) == 'string' and info or ''
    found[#found + 1] = info and (wants.unreadable and said:match('"unreadable": "([%d,]+)"') or 1) or 0
    if wants.layout then found[#found + 1] = said:find('"layout": ?%d') and 1 or 0 end
  else
    found[#found + 1] = all_live and 1 or redis.call('EXISTS', keys[at])
  end
end
return found
