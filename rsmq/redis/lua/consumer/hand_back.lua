#!lua flags=allow-oom
-- PURPOSE  Hand back messages that were fetched but not finished, so that the next owner can take them at once.
-- KEYS     1 stream  2 lease hash  3 dead-letter stream
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 keep:int, of dead letters  5..16 a lost body's dlq.* fields
--          then for each: stream id, attempts to leave charged
-- RETURNS  {'OK', handed back:int, lost id...} or {'STALE_EPOCH'}
-- WHY      A planned stop is not an attempt. The messages stay pending; in shared distribution their idle time is
--          raised so that another member may claim them. XCLAIM drops a message whose entry was deleted: then it
--          becomes a dead letter in the same step.
-- USES     bury_lost, may_write, can_write
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
if #ARGV > 16 then can_write('XCLAIM', KEYS[1], 'XADD', KEYS[3]) end
local idle, reply = ARGV[2] == '' and 86400000 or 0, { 'OK', 0 }
for i = 17, #ARGV, 2 do
  local id = ARGV[i]
  local row = redis.call('XPENDING', KEYS[1], ARGV[3], id, id, 1)[1]
  if row and row[2] == ARGV[1] then
    local left = { 'IDLE', idle, 'RETRYCOUNT', ARGV[i + 1], 'JUSTID' }
    if #redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, id, unpack(left)) > 0 then
      reply[2] = reply[2] + 1
    else
      bury_lost(KEYS[3], ARGV[4], id, unpack(ARGV, 5, 16))
      reply[#reply + 1] = id
    end
  end
end
return reply
