#!lua flags=allow-oom
-- PURPOSE  Move a message to the dead letters of its group.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 stream id  5 attempts charged so far:int  6 keep:int
--          7 again:0|1 (1: an earlier call may have been executed)
--          8.. dlq.* field, value, ... (`dlq.body` first: without the message's own fields)
-- RETURNS  {'OK', dead letter's id, is_deleted:0|1}, {'STALE_EPOCH'} or {'NOT_PENDING'}
-- WHY      One call writes the dead letter and then acknowledges, so a message is neither lost nor buried twice. The
--          body is copied inside the server. An entry with too many fields for one call is packed into one field. A
--          body that is too large to copy stays in the stream. Only the owner of a partition settles, so a message that
--          is not pending lost its consumer, unless this call was executed before. A failover may have lost the start of
--          a retry: then it is still parked, under the count that the server has.
--          What is a member of a batch leaves it with this call. The steps that its handler has kept go with it, and its
--          publisher hears of it, who has asked to keep a result.
-- USES     may_write, can_write, take_notes, keep_failure, batch_field, batch_keys, fire_batch, count_batch, leave_batch
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], ARGV[4], 1)[1]
if row and row[2] ~= ARGV[1] or not row and (ARGV[2] == '' or ARGV[7] == '1') then return { 'NOT_PENDING' } end
local entry = ARGV[8] == 'dlq.body' and { '', {} } or redis.call('XRANGE', KEYS[1], ARGV[4], ARGV[4])[1]
local fields = entry and entry[2] or { 'dlq.body', 'deleted' }
may_write('XACK', KEYS[1])
can_write('XADD', KEYS[4], 'ZREM', KEYS[3])
if #fields > 2000 then
  local packed = {}
  for i = 1, #fields do packed[i] = struct.pack('>I4', #fields[i]) .. fields[i] end
  fields = { 'dlq.packed', table.concat(packed) }
end
for i = 8, #ARGV do fields[#fields + 1] = ARGV[i] end
for _, part in ipairs(take_notes(KEYS[1], ARGV[3], ARGV[4])) do fields[#fields + 1] = part end
local id = redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[6], '*', unpack(fields))
redis.call('XACK', KEYS[1], ARGV[3], ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[4] .. '|' .. ARGV[5], ARGV[4] .. '|' .. (row and row[4] or ARGV[5]))
local reason = ARGV[8] == 'dlq.body' and ARGV[11] or ARGV[9]
local body = ARGV[8] == 'dlq.body' and redis.call('XRANGE', KEYS[1], ARGV[4], ARGV[4])[1] or entry
local member, error = body and batch_field(body[2]), ARGV[8] == 'dlq.body' and ARGV[13] or ARGV[11]
if body then keep_failure(KEYS[1], ARGV[3], body[2], reason, error) end
if member then leave_batch(KEYS[1], ARGV[3], { { member, reason == 'expired' and 'expired' or 'failed', '' } }) end
return { 'OK', id, entry and 0 or 1 }
