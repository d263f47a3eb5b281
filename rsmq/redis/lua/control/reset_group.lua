-- PURPOSE  Let a group start again at a given position of a partition, or of all that belong together.
-- KEYS     per partition: stream, lease hash, retry zset, cancels hash, cancelled zset, waits zset, calls hash
-- ARGV     1 group  2 start: stream id (exclusive), '0' or '$'
-- RETURNS  'OK'
-- WHY      The right to destroy a group is checked first, so that without it nothing changes.
--          Pending and parked messages belong to the old run. A new epoch makes every settlement of the old run void.
--          A store outside, which remembers what was handled, tells the runs apart by `run`. It grows with the clock, so
--          that a reset which a failover has lost does not give its number to the next one.
--          What was cancelled stays cancelled: the marks count again. Steps of the old run do not count in the new one.
--          The reader stays: its read may still be on its way, and the next owner must cut it off.
--          The partitions of a topic that was resized begin at once: one that follows others asks whether these are
--          finished, and must not find the old run of the one beside the new run of the other.
-- USES     whole, may_write, can_write
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for at = 1, #KEYS, 7 do
  if not redis.acl_check_cmd('XGROUP', 'DESTROY', KEYS[at], ARGV[1]) then
    return redis.error_reply('NOPERM this user may not reset a group: it has no right to XGROUP DESTROY')
  end
  local kind = redis.call('TYPE', KEYS[at]).ok
  if kind ~= 'none' and kind ~= 'stream' then return redis.error_reply('WRONGTYPE ' .. KEYS[at] .. ' is no stream') end
  can_write('HSET', KEYS[at + 1], 'UNLINK', KEYS[at + 2], 'HSET', KEYS[at + 3], 'ZADD UNLINK', KEYS[at + 4],
    'UNLINK', KEYS[at + 5], 'UNLINK', KEYS[at + 6])
end
for at = 1, #KEYS, 7 do
  local stream, lease, cancels, cancelled = KEYS[at], KEYS[at + 1], KEYS[at + 3], KEYS[at + 4]
  local found = redis.call('HMGET', lease, 'run', 'epoch')
  local run, epoch = math.max((whole(found[1]) or 0) + 1, now), (whole(found[2]) or now) + 1
  redis.pcall('XGROUP', 'DESTROY', stream, ARGV[1])
  redis.call('XGROUP', 'CREATE', stream, ARGV[1], ARGV[2], 'MKSTREAM')
  redis.call('UNLINK', KEYS[at + 2], KEYS[at + 5], KEYS[at + 6],
    stream .. ':' .. ARGV[1] .. ':steps', stream .. ':' .. ARGV[1] .. ':progress')
  for _, id in ipairs(redis.call('ZRANGE', cancelled, 0, -1)) do redis.call('HSET', cancels, id, 'cancelled') end
  redis.call('UNLINK', cancelled)
  redis.call('HSET', lease, 'owner', '', 'until_ms', '0', 'run', string.format('%.0f', run), 'epoch',
    string.format('%.0f', epoch))
end
return 'OK'
