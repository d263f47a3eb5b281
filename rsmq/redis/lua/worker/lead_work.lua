-- PURPOSE  Become or stay the member that does a piece of work for all workers, such as relaying an outbox, or release it.
-- KEYS     1 leader hash
-- ARGV     1 owner  2 ttl_ms:int, 0 releases it  3 epoch:int of the owner's last grant, 0 if it has none
-- RETURNS  {'OK', epoch:int} or {'HELD', remaining_ms:int}
-- WHY      Each change of the owner has a higher epoch, which later writes carry, so that those of an earlier leader are
--          refused. A bid is a renewal only under the epoch of its grant: two processes with one member id, as after the
--          restore of a machine's snapshot, must not lead together. Epochs grow with the clock, so that the next one is higher, too, when a failover has lost the hash. A
--          lease longer than its ttl comes from a jump of the clock and counts as free. A week after the last bid the
--          work is gone, such as the database of an outbox.
-- USES     whole, may_write, can_write
local owner, ttl = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('HMGET', KEYS[1], 'owner', 'until_ms', 'epoch')
local left, epoch = (whole(found[2]) or 0) - now, whole(found[3]) or 0
can_write('HSET PEXPIRE', KEYS[1])
local is_own = found[1] == owner and epoch == tonumber(ARGV[3])
if ttl == 0 then
  if is_own then redis.call('HSET', KEYS[1], 'owner', '', 'until_ms', '0') end
  return { 'OK', epoch }
end
local is_led = whole(found[3]) and found[1] and found[1] ~= '' and left > 0 and left <= ttl
if is_led and not is_own then return { 'HELD', left } end
if not is_led then epoch = math.max(epoch + 1, now) end
redis.call('HSET', KEYS[1], 'owner', owner, 'until_ms', string.format('%.0f', now + ttl), 'epoch',
  string.format('%.0f', epoch))
redis.call('PEXPIRE', KEYS[1], 604800000)
return { 'OK', epoch }
