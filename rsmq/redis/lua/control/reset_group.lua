-- PURPOSE  Let a group start again at a given position of one partition.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 cancels hash  5 cancelled zset  6 waits zset  7 calls hash
-- ARGV     1 group  2 start: stream id (exclusive), '0' or '$'
-- RETURNS  'OK'
-- WHY      The right to destroy a group is checked first, so that without it nothing changes.
--          Pending and parked messages belong to the old run. A new epoch makes every settlement of the old run void.
--          A store outside, which remembers what was handled, tells the runs apart by `run`. It grows with the clock, so
--          that a reset which a failover has lost does not give its number to the next one.
--          What was cancelled stays cancelled: the marks count again.
--          The reader stays: its read may still be on its way, and the next owner must cut it off.
-- USES     whole, can_write
if not redis.acl_check_cmd('XGROUP', 'DESTROY', KEYS[1], ARGV[1]) then
  return redis.error_reply('NOPERM this user may not reset a group: it has no right to XGROUP DESTROY')
end
local time, found = redis.call('TIME'), redis.call('HMGET', KEYS[2], 'run', 'epoch')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local run, epoch = math.max((whole(found[1]) or 0) + 1, now), (whole(found[2]) or now) + 1
can_write('HSET', KEYS[2], 'UNLINK', KEYS[3], 'HSET', KEYS[4], 'ZADD UNLINK', KEYS[5], 'UNLINK', KEYS[6])
can_write('UNLINK', KEYS[7])
redis.pcall('XGROUP', 'DESTROY', KEYS[1], ARGV[1])
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2], 'MKSTREAM')
redis.call('UNLINK', KEYS[3], KEYS[6], KEYS[7])
for _, id in ipairs(redis.call('ZRANGE', KEYS[5], 0, -1)) do redis.call('HSET', KEYS[4], id, 'cancelled') end
redis.call('UNLINK', KEYS[5])
redis.call('HSET', KEYS[2], 'owner', '', 'until_ms', '0', 'run', string.format('%.0f', run), 'epoch',
  string.format('%.0f', epoch))
return 'OK'
