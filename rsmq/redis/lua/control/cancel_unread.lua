#!lua flags=allow-oom
-- PURPOSE  Cancel a message of a partition that no group reads yet: it is removed.
-- KEYS     1 stream  2 dedup string of its message id  3 dedup string of its stream id  4 removed hash
-- ARGV     1 stream id  2 window_ms:int
-- RETURNS  'CANCELLED', 'GONE' (the entry is not there), or 'GROUPS': there is a group, which may have it
-- WHY      Without a group there is no place for a mark, and the first group begins with what is there. A group is made
--          by one command: either it is there before, and this call leaves the message alone, or it never sees it. As
--          with delayed messages the dedup strings say for a while that it was cancelled: a second call gets this answer,
--          and a publish that is sent again does not bring it back. The entry counts as removed by rsmq, not by others.
--          A member of a batch whose group was deleted leaves the batch with this call.
-- USES     whole, may_write, can_write, batch_field, batch_keys, fire_batch, count_batch, leave_batch
local rows = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if not rows.err and #rows > 0 then return 'GROUPS' end
if redis.call('GET', KEYS[2]) == 'cancelled' then return 'CANCELLED' end
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return 'GONE' end
can_write('XDEL', KEYS[1], 'SET', KEYS[2], 'SET', KEYS[3], 'HSET', KEYS[4])
local own = whole(redis.call('HGET', KEYS[4], 'own')) or 0
redis.call('XDEL', KEYS[1], ARGV[1])
local member = batch_field(entry[2])
if member then leave_batch(KEYS[1], nil, { { member, 'cancelled', '' } }) end
redis.call('SET', KEYS[2], 'cancelled', 'PX', ARGV[2])
redis.call('SET', KEYS[3], 'cancelled', 'PX', ARGV[2])
redis.call('HSET', KEYS[4], 'own', string.format('%.0f', own + 1))
return 'CANCELLED'
