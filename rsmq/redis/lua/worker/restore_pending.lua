-- PURPOSE  Make messages in flight of the owner of a partition pending again after its consumer was deleted.
-- KEYS     1 stream  2 lease hash
-- ARGV     1 owner  2 epoch  3 group  4 restore:0|1 (0: only report)  then for each: stream id, attempts charged:int
-- RETURNS  {'OK', ids that are not pending...} (with restore: those made pending again) or {'STALE_EPOCH'}
-- WHY      XGROUP DELCONSUMER deletes the pending list too: if this owner died, its messages in flight would be lost.
--          Messages that the group will receive again (it was reset or created anew) and deleted entries are left
--          alone.
-- both halves of an id may exceed the 53 bits of a number, so ids are compared as text
-- USES     dict, order
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
local reply, delivered = { 'OK' }, order('0-0')
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = dict(row)
  if group.name == ARGV[3] then delivered = order(group['last-delivered-id']) end
end
for i = 5, #ARGV, 2 do
  if order(ARGV[i]) <= delivered and not redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[i], ARGV[i], 1)[1] then
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
