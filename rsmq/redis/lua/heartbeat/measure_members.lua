#!lua flags=no-writes
-- PURPOSE  Read a group's members for the inspector: their info, the age of their heartbeats, the lag of their loops.
-- KEYS     1 group hash  2 set of member ids  3 a heartbeat's key without the member id  4 a loop lag's key without it
-- ARGV     (none)
-- RETURNS  {now_ms, distribution, paused, holds, member, info, ms left, loop lag, ...}; '' is none
-- WHY      One command for all members. It derives keys from ids that it has read, which is allowed only in a script
--          without writes; the keys have the group's hash tag, so they are in its slot.
local time = redis.call('TIME')
local about = redis.call('HMGET', KEYS[1], 'distribution', 'paused', 'holds')
local found = { time[1] * 1000 + math.floor(time[2] / 1000), about[1] or '', about[2] or '', about[3] or '' }
for _, member in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  found[#found + 1] = member
  found[#found + 1] = redis.call('GET', KEYS[3] .. member) or ''
  found[#found + 1] = redis.call('PTTL', KEYS[3] .. member)
  found[#found + 1] = redis.call('GET', KEYS[4] .. member) or ''
end
return found
