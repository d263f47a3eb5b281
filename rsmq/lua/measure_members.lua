#!lua flags=no-writes
-- PURPOSE  Measure a group's members: what they are, when they were heard of, how late their loops are.
-- KEYS     1 group hash  2 set of member ids  3 a heartbeat's key without the member id  4 a vitals' key without it
-- ARGV     (none)
-- RETURNS  {now_ms, distribution, paused, member, info, ms left, vitals, ...}; '' is none
-- WHY      One command for all members. It derives keys from ids that it has read, which only a script that cannot write
--          may; they have the group's hash tag, so they are in its slot.
local time = redis.call('TIME')
local about = redis.call('HMGET', KEYS[1], 'distribution', 'paused')
local found = { time[1] * 1000 + math.floor(time[2] / 1000), about[1] or '', about[2] or '' }
for _, member in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  found[#found + 1] = member
  found[#found + 1] = redis.call('GET', KEYS[3] .. member) or ''
  found[#found + 1] = redis.call('PTTL', KEYS[3] .. member)
  found[#found + 1] = redis.call('GET', KEYS[4] .. member) or ''
end
return found
