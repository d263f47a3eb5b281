-- PURPOSE  Open a batch, or go on with one that its publisher has left open.
-- KEYS     1 names hash  2 state hash of the new id  3 due zset
-- ARGV     1 name  2 home (shard and id)  3 resume:0|1  4 lifetime_ms:int, until `expires`  5 keep_ms:int, after its callback
--          6.. field, value, ... of the state: group, on_complete, on_success
-- RETURNS  {'OK', home} (with resume: that of the batch that is there), {'EXISTS', home} or {'GONE'} (nothing to resume)
-- WHY      Name, state and end are written in one step: so each batch that is known by its name ends. The caller makes the
--          id: a call that is sent again after a lost reply finds its own batch, and a name that is used again later has
--          another one, which members of the old batch do not reach.
-- USES     may_write, can_write
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known == ARGV[2] then return { 'OK', known } end
if known then return { ARGV[3] == '1' and 'OK' or 'EXISTS', known } end
if ARGV[3] == '1' then return { 'GONE' } end
can_write('HSET', KEYS[1], 'HSET', KEYS[2], 'ZADD', KEYS[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ends = string.format('%.0f', now + ARGV[4])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], 'name', ARGV[1], 'opened_ms', string.format('%.0f', now), 'expires_ms', ends, 'keep_ms', ARGV[5],
  unpack(ARGV, 6))
redis.call('ZADD', KEYS[3], ends, ARGV[2])
return { 'OK', ARGV[2] }
