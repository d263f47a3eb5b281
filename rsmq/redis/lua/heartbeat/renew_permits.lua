#!lua flags=allow-oom
-- PURPOSE  Prolong all permits that a member holds in a group.
-- KEYS     1 hash: the members that hold permits
-- ARGV     1 member  2 token of its permits:int  3 ttl:ms
-- RETURNS  'OK' or 'STALE_EPOCH'
-- WHY      A token that has run out, and whose permits no other member has taken, still belongs to its member: after an outage
--          the members renew theirs.
-- USES     may_write
local token = (redis.call('HGET', KEYS[1], ARGV[1]) or ''):match('^(%d+)|%d+|%d+$')
if token ~= ARGV[2] then return 'STALE_EPOCH' end
may_write('HSET PEXPIRE', KEYS[1])
local time = redis.call('TIME')
local ends = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], token .. '|' .. ends .. '|' .. ARGV[3])
redis.call('PEXPIRE', KEYS[1], 86400000)
return 'OK'
