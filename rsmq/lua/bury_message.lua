#!lua flags=allow-oom
-- PURPOSE  Move a message to the dead letters of its group.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 stream id  5 attempts charged so far:int  6 keep:int
--          7.. dlq.* field, value, ... (`dlq.body` first: without the message's own fields)
-- RETURNS  {'OK', dead letter's id}, {'STALE_EPOCH'} or {'NOT_PENDING'}
-- WHY      Written before it is acknowledged, in one call: neither lost nor buried twice. The body is copied inside
--          the server. An entry too wide for one call is kept packed; one too large to be moved
--          stays where it is.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], ARGV[4], 1)[1]
if not row or row[2] ~= ARGV[1] then return { 'NOT_PENDING' } end
local entry = ARGV[7] ~= 'dlq.body' and redis.call('XRANGE', KEYS[1], ARGV[4], ARGV[4])[1]
local fields = entry and entry[2] or {}
if #fields > 2000 then
  local packed = {}
  for i = 1, #fields do packed[i] = struct.pack('>I4', #fields[i]) .. fields[i] end
  fields = { 'dlq.packed', table.concat(packed) }
end
for i = 7, #ARGV do fields[#fields + 1] = ARGV[i] end
local id = redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[6], '*', unpack(fields))
redis.call('XACK', KEYS[1], ARGV[3], ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[4] .. '|' .. ARGV[5])
return { 'OK', id }
