-- PURPOSE  Move delayed messages that are due into the stream.
-- KEYS     1 stream  2 delayed zset  3 unique hash
-- ARGV     1 limit:int  2 max_length:int (0 = no limit)  3 on_full:reject|trim
-- RETURNS  {moved:int, wait_ms:int until the next one is due (at most a day), -1 if there is none, is_full:0|1 (no room for the next)}
-- WHY      ZREM and XADD run in one script: a poller that dies loses no message and moves none twice.
--          A message that holds a unique name has it as its first field: the record of the name follows it.
--          Nothing may fail once a message is stored, or it would be stored in each round: a record that is none is
--          left to `forget_names`. A message that cannot be unpacked becomes an entry without `data`: consumers bury it as malformed.
-- USES     is_id, name_record, may_write, can_write, release_due
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local moved, is_full = release_due(KEYS[1], KEYS[2], KEYS[3], now, ARGV[1], tonumber(ARGV[2]), ARGV[3])
local next = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if #next == 0 then return { moved, -1, is_full } end
return { moved, math.min(math.max(0, tonumber(next[2]) - now), 86400000), is_full }
