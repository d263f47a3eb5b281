-- PURPOSE  Publish one tick of a schedule, unless it or a later one is published already, or a run that was asked for.
-- KEYS     1 stream  2 schedules hash
-- ARGV     1 name of the schedule  2 tick:ms, or + and the ms at which a run was asked for  3 max_length:int
--          4 on_full:reject|trim  5 report of this run, for operators:json, on one line
--          6.. field, value, ...; without fields the tick is only recorded as done
-- RETURNS  'OK', 'DUPLICATE', 'GONE' or 'FULL'
-- WHY      The stream and the record are in one slot, so each tick is published exactly once, also by a leader that was
--          paused. A run that was asked for is no tick: its request is removed instead, and the ticks stay as they are.
--          A schedule whose rule is gone was removed or has moved to another hash: nothing is left here.
-- USES     whole, may_write, can_write, note_run
local found = redis.call('HMGET', KEYS[2], 'last|' .. ARGV[1], 'run|' .. ARGV[1], 'rule|' .. ARGV[1])
if not found[3] then return 'GONE' end
local run = string.match(ARGV[2], '^%+(%d+)$')
if run and found[2] ~= run then return 'DUPLICATE' end
if not run and (whole(found[1]) or -1) >= tonumber(ARGV[2]) then return 'DUPLICATE' end
can_write('XADD', KEYS[1], 'HSET HDEL', KEYS[2])
local max = tonumber(ARGV[3])
if #ARGV > 5 then
  if max > 0 and ARGV[4] == 'trim' then
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(ARGV, 6))
  else
    if max > 0 and redis.call('XLEN', KEYS[1]) >= max then return 'FULL' end
    redis.call('XADD', KEYS[1], '*', unpack(ARGV, 6))
  end
end
if run then
  redis.call('HDEL', KEYS[2], 'run|' .. ARGV[1])
else
  redis.call('HSET', KEYS[2], 'last|' .. ARGV[1], ARGV[2])
end
redis.call('HDEL', KEYS[2], 'failures|' .. ARGV[1], 'trace|' .. ARGV[1])
note_run(KEYS[2], ARGV[1], ARGV[5])
return 'OK'
