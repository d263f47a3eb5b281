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
local time = redis.call('TIME')
local about = redis.call('HMGET', KEYS[2], 'paused', 'holds')
local found = { time[1], time[2], about[1] or '', about[2] or '' }
local wants = {}
for _, word in ipairs(ARGV) do wants[word] = true end
if wants.layout then found[5] = redis.call('HGET', KEYS[2], 'unfinished') or '' end
for _, member in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  found[#found + 1] = member
  if ARGV[1] then
    local info = redis.pcall('GET', KEYS[3] .. member) -- another client may have written another type
    local said = type(info) == 'string' and info or ''
    found[#found + 1] = info and (wants.unreadable and said:match('"unreadable": "([%d,]+)"') or 1) or 0
    if wants.layout then found[#found + 1] = said:find('"layout": ?%d') and 1 or 0 end
  else
    found[#found + 1] = redis.call('EXISTS', KEYS[3] .. member)
  end
end
return found
