-- PURPOSE  Publish one tick of a schedule, unless it or a later one is published already.
-- KEYS     1 stream  2 schedules hash
-- ARGV     1 name of the schedule  2 tick:ms  3 max_length:int  4 on_full:reject|trim  5.. field, value, ...; without
--          fields the tick is only recorded as done
-- RETURNS  'OK', 'DUPLICATE' or 'FULL'
-- WHY      The stream and the record are in one slot, so each tick is published exactly once, also by a leader that was
--          paused.
local last = redis.call('HGET', KEYS[2], 'last|' .. ARGV[1])
if last and tonumber(last) >= tonumber(ARGV[2]) then return 'DUPLICATE' end
local max = tonumber(ARGV[3])
if #ARGV > 4 then
  if max > 0 and ARGV[4] == 'trim' then
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(ARGV, 5))
  else
    if max > 0 and redis.call('XLEN', KEYS[1]) >= max then return 'FULL' end
    redis.call('XADD', KEYS[1], '*', unpack(ARGV, 5))
  end
end
redis.call('HSET', KEYS[2], 'last|' .. ARGV[1], ARGV[2])
return 'OK'
