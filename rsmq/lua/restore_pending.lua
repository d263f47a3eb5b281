-- PURPOSE  Make pending again what the owner of a partition has in hand and is not: somebody has deleted its consumer.
-- KEYS     1 stream  2 lease hash
-- ARGV     1 owner  2 epoch  3 group  4 restore:0|1 (0: only tell)  then for each: stream id, attempts charged:int
-- RETURNS  {'OK', ids that are not pending...} (with restore: those made pending again) or {'STALE_EPOCH'}
-- WHY      XGROUP DELCONSUMER destroys the pending list with it: if this owner dies, nobody would know what it had.
--          What the group will be given once more (it was reset, or made anew) is left alone, and so is what is gone.
local function parts(id)
  local ms, seq = id:match('^(%d+)%-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
local reply, ms, seq = { 'OK' }, 0, 0
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #row, 2 do group[row[i]] = row[i + 1] end
  if group.name == ARGV[3] then ms, seq = parts(group['last-delivered-id']) end
end
for i = 5, #ARGV, 2 do
  local id_ms, id_seq = parts(ARGV[i])
  local is_delivered = id_ms < ms or (id_ms == ms and id_seq <= seq)
  if is_delivered and not redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[i], ARGV[i], 1)[1] then
    if ARGV[4] == '0' then
      reply[#reply + 1] = ARGV[i]
    else
      local count = { 'RETRYCOUNT', ARGV[i + 1], 'FORCE', 'JUSTID' }
      local claimed = redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, ARGV[i], unpack(count))
      if #claimed > 0 then reply[#reply + 1] = ARGV[i] end
    end
  end
end
return reply
