-- PURPOSE  Become or stay the leader of a schedule, which publishes its ticks, or release it.
-- KEYS     1 schedules hash
-- ARGV     1 name of the schedule  2 owner  3 ttl_ms:int, 0 releases it  4 the rule of its code, shown to operators:json
--          5 1: no code has it, so it must be here
-- RETURNS  {'OK', last tick:ms, now:ms, when a run was asked for:ms or 0, paused since:ms or 0, the rule of an operator
--          or '', failures in a row}, {'HELD', remaining_ms} or {'GONE', 0}
-- WHY      Only the leader does the work of a tick. That a tick is published once does not depend on it: see
--          publish_tick. A new schedule begins now, and so does one whose rule has changed: by its code or by an
--          operator. A lease longer than its ttl comes from a jump of the clock and counts as free. One that was added
--          may have moved to another hash, or was removed, since it was read: no record may begin here then.
-- USES     whole, may_write, can_write
local name, owner, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('HMGET', KEYS[1], 'owner|' .. name, 'until|' .. name, 'last|' .. name, 'run|' .. name,
  'rule|' .. name, 'served|' .. name, 'set|' .. name, 'paused|' .. name, 'failures|' .. name)
can_write('HSET HDEL', KEYS[1])
if ARGV[5] == '1' and redis.call('HEXISTS', KEYS[1], 'added|' .. name) == 0 then return { 'GONE', 0 } end
local left, seen, set = (whole(found[2]) or 0) - now, whole(found[3]), found[7] or ''
if ttl == 0 then
  if found[1] == owner then redis.call('HDEL', KEYS[1], 'owner|' .. name, 'until|' .. name) end
  return { 'OK', seen or now, now, 0, 0, '', 0 }
end
if found[1] and found[1] ~= owner and left > 0 and left <= ttl then return { 'HELD', left } end
local rule, before = set ~= '' and set or ARGV[4], found[6] or found[5]
redis.call('HSET', KEYS[1], 'owner|' .. name, owner, 'until|' .. name, string.format('%.0f', now + ttl), 'rule|' .. name,
  ARGV[4])
if rule ~= found[6] then redis.call('HSET', KEYS[1], 'served|' .. name, rule) end
local last, is_changed = seen or now, before and before ~= rule
if is_changed then last = math.max(last, now) end
if is_changed or not seen then redis.call('HSET', KEYS[1], 'last|' .. name, string.format('%.0f', last)) end
return { 'OK', last, now, whole(found[4]) or 0, whole(found[8]) or 0, set, whole(found[9]) or 0 }
