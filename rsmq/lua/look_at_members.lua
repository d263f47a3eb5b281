#!lua flags=no-writes
-- PURPOSE  Look at a group as its members do: who is in it, whose heartbeat is there, whether it is paused.
-- KEYS     1 set of member ids  2 group hash  3 a heartbeat's key without the member id
-- ARGV     (none)
-- RETURNS  {seconds, microseconds (the server's clock), paused ('1' or ''), member, heartbeat:0|1, ...}
-- WHY      Every member asks every heartbeat: one command. It derives keys from ids that it has read, which only a script
--          that cannot write may; they have the group's hash tag, so they are in its slot. Keys run out by the clock
--          that it returns, so that a jump of that clock is seen together with what it has ended.
local time = redis.call('TIME')
local found = { time[1], time[2], redis.call('HGET', KEYS[2], 'paused') or '' }
for _, member in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  found[#found + 1] = member
  found[#found + 1] = redis.call('EXISTS', KEYS[3] .. member)
end
return found
