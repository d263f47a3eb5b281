#!lua flags=allow-oom
-- PURPOSE  Cancel one message of a partition for one group, as far as that needs no answer of its owner.
-- KEYS     1 stream  2 retry zset  3 cancels hash  4 cancelled zset  5 waits zset
-- ARGV     1 group  2 stream id  3 asked|interrupt (also what runs)  4 most attempts to look for:int
-- RETURNS  {'CANCELLED', wake:0|1, by this call, for good:0|1}, {'ASKED'} (its owner has to answer), {'RUNNING'}, {'SETTLED'} or {'UNKNOWN'}
-- WHY      Each case is final where it says so. Not delivered: its reader looks into `cancels` behind the read.
--          Parked: `start_message` looks, and the owner is woken where the message holds its key. In a member's hands: a
--          first delivery starts without telling the server, so only the owner knows; it answers in `cancels`, or by a
--          settlement, and this call is repeated until then. With a count of 0 it has not started (it was put aside or
--          handed back), and both ways to start it look: read_again and start_message. What waits for a time neither, and
--          is due now: its owner meets the mark. Both halves of an id may exceed the 53 bits of a number.
--          A parked member of a batch leaves it with this call, and who waits for its result hears of it.
-- USES     dict, order, last_delivered, find_parked, may_write, can_write, take_notes, keep_failure, batch_field, batch_keys, fire_batch, count_batch, leave_batch
local stream, group, id = KEYS[1], ARGV[1], ARGV[2]
if redis.call('ZSCORE', KEYS[4], id) then return { 'CANCELLED', 0 } end
local last = last_delivered(stream, group)
local entry = redis.call('XRANGE', stream, id, id)[1]
if not last or not entry then
  redis.call('HDEL', KEYS[3], id)
  return { 'UNKNOWN' }
end
local known = redis.call('HGET', KEYS[3], id)
if order(id) > order(last) then
  redis.call('HSET', KEYS[3], id, 'cancelled')
  return { 'CANCELLED', 0 }
end
local row = redis.call('XPENDING', stream, group, id, id, 1)[1]
local attempts = find_parked(KEYS[2], id, row, ARGV[4])
if attempts and row then
  redis.call('HSET', KEYS[3], id, 'cancelled')
  return { 'CANCELLED', 1 }
elseif attempts then
  can_write('ZREM', KEYS[2], 'HDEL', KEYS[3], 'ZADD', KEYS[4])
  redis.call('ZREM', KEYS[2], id .. '|' .. attempts)
  redis.call('HDEL', KEYS[3], id)
  redis.call('ZADD', KEYS[4], id:match('^%d+'), id)
  local member = batch_field(entry[2])
  if member then leave_batch(stream, group, { { member, 'cancelled', '' } }) end
  keep_failure(stream, group, entry[2], 'cancelled', 'it was cancelled')
  take_notes(stream, group, id)
  return { 'CANCELLED', 0, 1 }
end
if not row then
  redis.call('HDEL', KEYS[3], id)
  return { 'SETTLED' }
end
local waits = tonumber(redis.call('ZSCORE', KEYS[5], id) or 0) > 0
if waits then redis.call('ZADD', KEYS[5], 1, id) end
if waits or known == 'cancelled' or row[4] == 0 and known ~= 'running' then
  redis.call('HSET', KEYS[3], id, 'cancelled')
  return { 'CANCELLED', 1 }
end
if known == 'running' and ARGV[3] == 'asked' then return { 'RUNNING' } end
if known ~= 'interrupt' then redis.call('HSET', KEYS[3], id, ARGV[3]) end
return { 'ASKED' }
