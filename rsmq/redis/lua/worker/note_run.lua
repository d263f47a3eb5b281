-- PURPOSE  Note a run of a schedule that published nothing: its function has failed, or the topic is full.
-- KEYS     1 schedules hash
-- ARGV     1 name of the schedule  2 owner  3 report:json, on one line  4 traceback, or nothing
-- RETURNS  failures in a row, or 'HELD' by another leader
-- WHY      Operators see what fails without the log of the process. Only the leader knows what is true now.
-- USES     whole, note_run
local key, name = KEYS[1], ARGV[1]
local found = redis.call('HMGET', key, 'owner|' .. name, 'failures|' .. name)
if found[1] ~= ARGV[2] then return 'HELD' end
local failures = (whole(found[2]) or 0) + 1
redis.call('HSET', key, 'failures|' .. name, failures, 'trace|' .. name, ARGV[4])
note_run(key, name, ARGV[3])
return failures
