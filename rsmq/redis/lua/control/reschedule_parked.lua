#!lua flags=allow-oom
-- PURPOSE  Give a parked message of a group another due time, as far as that needs no answer of its owner.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 cancels hash  5 cancelled zset  6 errors hash
-- ARGV     1 group  2 stream id  3 due:ms since 1970, or '+ms' from the server's now  4 most attempts to look for:int
--          5 ask|end (do not ask any more)
-- RETURNS  {'OK', due_ms}, {'ASKED', due_ms} (its owner has the timer), or where it is instead: {'UNREAD'},
--          {'RUNNING'} (also if it starts next), {'SETTLED'}, {'CANCELLED'} or {'UNKNOWN'}
-- WHY      Without key order the due time is all there is. A message that keeps its key has a timer in its owner, which
--          may be starting it now, so only the owner moves it: see move_parked. This call is repeated until then. If the
--          lease has run out, the epoch is raised: an owner that was only paused cannot start it at the old time.
--          A note in `errors` tells the caller of a message that has started since that it was moved before.
-- USES     dict, order, last_delivered, find_parked, follow_clock
local stream, group, id, mark = KEYS[1], ARGV[1], ARGV[2], ARGV[2] .. '|due'
if redis.call('ZSCORE', KEYS[5], id) or redis.call('HGET', KEYS[4], id) == 'cancelled' then return { 'CANCELLED' } end
local last = last_delivered(stream, group)
if not last or #redis.call('XRANGE', stream, id, id) == 0 then return { 'UNKNOWN' } end
if order(id) > order(last) then return { 'UNREAD' } end
local row = redis.call('XPENDING', stream, group, id, id, 1)[1]
local now = follow_clock(KEYS[2], KEYS[3])
local attempts, score = find_parked(KEYS[3], id, row, ARGV[4])
local asked = redis.call('HGET', KEYS[4], mark)
local due = string.format('%.0f', ARGV[3]:sub(1, 1) == '+' and now + ARGV[3] or tonumber(ARGV[3]))
if not attempts then
  redis.call('HDEL', KEYS[4], mark)
  if redis.call('HGET', KEYS[6], mark) == due then return { 'OK', due } end
  return { row and 'RUNNING' or 'SETTLED' }
end
local lease = redis.call('HMGET', KEYS[2], 'owner', 'until_ms', 'epoch')
if row and (lease[1] or '') ~= '' then
  if tonumber(lease[2] or 0) > now then
    if asked ~= due and string.format('%.0f', score) == due then return { 'OK', due } end
    if ARGV[5] == 'end' then
      redis.call('HDEL', KEYS[4], mark)
      return { 'RUNNING' }
    end
    redis.call('HSET', KEYS[4], mark, due)
    return { 'ASKED', due }
  end
  redis.call('HSET', KEYS[2], 'owner', '', 'epoch', string.format('%.0f', (lease[3] or 0) + 1))
end
redis.call('HDEL', KEYS[4], mark)
redis.call('HSET', KEYS[6], mark, due)
redis.call('ZADD', KEYS[3], due, id .. '|' .. attempts)
return { 'OK', due }
