#!lua flags=allow-oom
-- PURPOSE  Cancel a delayed message, for all groups.
-- KEYS     1 delayed zset  2 dedup string of its message id
-- ARGV     1 packed entry  2 window_ms:int
-- RETURNS  'CANCELLED' or 'GONE' (it has become due meanwhile, or was moved)
-- WHY      Removing it is exact: what is due moves into the stream in one script, too. Its dedup string says that it was
--          cancelled, so that a publish that is sent again does not bring it back, and a second call gets this answer.
--          A member of a batch leaves it with this call. A call for its result gets that answer, in each group that
--          the partition has.
-- USES     dict, keep_failure, batch_field, batch_keys, fire_batch, count_batch, leave_batch, unpacked_fields
if redis.call('GET', KEYS[2]) == 'cancelled' then return 'CANCELLED' end
local due = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not due then return 'GONE' end
redis.call('ZREM', KEYS[1], ARGV[1])
local fields = unpacked_fields(ARGV[1]) or {}
local stream = KEYS[1]:match('^(.*):delayed$')
local groups = redis.pcall('XINFO', 'GROUPS', stream)
for _, row in ipairs(groups.err and {} or groups) do
  keep_failure(stream, dict(row).name, fields, 'cancelled', 'it was cancelled')
end
local member = batch_field(fields)
if member then leave_batch(stream, nil, { { member, 'cancelled', '' } }) end
local now = redis.call('TIME')
local left = math.max(0, tonumber(due) - now[1] * 1000)
redis.call('SET', KEYS[2], 'cancelled', 'PX', string.format('%.0f', left + ARGV[2]))
return 'CANCELLED'
