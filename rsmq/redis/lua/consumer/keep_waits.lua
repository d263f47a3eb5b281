#!lua flags=allow-oom
-- PURPOSE  Note until when messages wait that do not start yet because of the time, and name those whose time has come.
-- KEYS     1 lease hash  2 waits zset
-- ARGV     1 owner  2 epoch  3 limit:int, of those that are named  4 number of ids to forget:int, then these ids,
--          then for each new one: stream id, due:ms since 1970, or '+ms' from when it was stored
-- RETURNS  {'OK', ms until the next one is due (-1 = none), {id, 1 = rescheduled, 2 = cancelled, or 0}...} or
--          {'STALE_EPOCH'}
-- WHY      What is named gets the due time 0 (-1: it was rescheduled, -2: cancelled), so it cannot be moved, and is named
--          again until the owner has it forgotten: a lost reply loses none, and the next owner finds it. Only the
--          server's clock counts: what is due moves back with it, and what was stored before that counts as stored now.
--          A due time with a fraction was given by hand; one that is there is not replaced by an older answer. Of two
--          ends of a window the earlier one counts: the other is of a clock that was ahead. What is settled meanwhile
--          is named once more, and forgotten by the owner, who does not know it.
-- USES     follow_clock, may_write, can_write
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
can_write('ZADD ZREM', KEYS[2], 'HSET', KEYS[1])
local first = 5 + ARGV[4]
for i = 5, first - 1 do redis.call('ZREM', KEYS[2], ARGV[i]) end
local now = follow_clock(KEYS[1], KEYS[2], 'waits_clock')
for i = first, #ARGV, 2 do
  local known, due = redis.call('ZSCORE', KEYS[2], ARGV[i]), ARGV[i + 1]
  if due:sub(1, 1) == '+' then
    due = string.format('%.0f', math.min(tonumber(ARGV[i]:match('^%d+')), now) + due)
    if known and known % 1 == 0 and tonumber(known) > tonumber(due) then known = nil end
  end
  if not known or tonumber(known) <= 0 then redis.call('ZADD', KEYS[2], due, ARGV[i]) end
end
local rows, named = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[3]), {}
for i = 1, #rows, 2 do
  local due = tonumber(rows[i + 1])
  local why = (due == -1 or due % 1 ~= 0) and 1 or (due == -2 or due == 1) and 2 or 0
  if due > 0 then redis.call('ZADD', KEYS[2], -why, rows[i]) end
  named[#named + 1] = { rows[i], why }
end
local following = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
return { 'OK', following[2] and math.ceil(following[2] - now) or -1, unpack(named) }
