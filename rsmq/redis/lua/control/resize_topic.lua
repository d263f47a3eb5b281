-- PURPOSE  Seal the partitions of a topic that others follow, and let messages go to these: all at once.
-- KEYS     1 topic hash  then of each partition to seal: stream, removed hash
--          then the streams of the partitions that follow
-- ARGV     1 the layout that was read  2 the new one  3 what `partitions` becomes  4 partitions to seal:int
-- RETURNS  {'OK'}, {'CHANGED'} (another layout is there), {'GONE'} or {'GROUPS', group} (it is not in every partition
--          that follows)
-- WHY      After XSETID to the largest id the server refuses every XADD to a stream, of any client, also after a restart
--          and a failover. Its messages stay, and are read, settled and trimmed as before. All happens in one step,
--          so no topic is half resized, and a call that is repeated after a lost reply, or that comes late, meets another
--          layout. A group that is not in the partitions that follow would lose what retention
--          removes there. Every right is asked for first: a seal cannot be taken back.
--          What XINFO said of the newest entry is noted as `end`, for readers that count up to it.
-- USES     dict, may_write, can_write
local found = redis.call('HMGET', KEYS[1], 'partitions', 'layout')
if not found[1] then return { 'GONE' } end
if found[2] ~= ARGV[1] then return { 'CHANGED' } end
local sealed, largest = 2 * ARGV[4] + 1, '18446744073709551615-18446744073709551615'
local function groups_of(stream)
  local rows, names = redis.pcall('XINFO', 'GROUPS', stream), {}
  for _, row in ipairs(rows.err and {} or rows) do names[dict(row).name] = true end
  return names
end
local wanted = {}
for at = 2, sealed, 2 do
  for name in pairs(groups_of(KEYS[at])) do wanted[name] = true end
end
for at = sealed + 1, #KEYS do
  local known = groups_of(KEYS[at])
  for name in pairs(wanted) do
    if not known[name] then return { 'GROUPS', name } end
  end
end
can_write('HSET', KEYS[1])
for at = 2, sealed, 2 do
  can_write('XSETID', KEYS[at], 'HSET', KEYS[at + 1])
  local may_make = redis.acl_check_cmd('XGROUP', 'CREATE', KEYS[at], 'g', '$', 'MKSTREAM')
    and redis.acl_check_cmd('XGROUP', 'DESTROY', KEYS[at], 'g')
  if redis.call('EXISTS', KEYS[at]) == 0 and not may_make then
    return redis.error_reply('NOPERM this user may not make ' .. KEYS[at] .. ': it has no right to XGROUP DESTROY')
  end
end
for at = 2, sealed, 2 do
  if redis.call('EXISTS', KEYS[at]) == 0 then -- XSETID makes no stream
    redis.call('XGROUP', 'CREATE', KEYS[at], 'sealed', '$', 'MKSTREAM')
    redis.call('XGROUP', 'DESTROY', KEYS[at], 'sealed')
  end
  redis.call('HSET', KEYS[at + 1], 'end', dict(redis.call('XINFO', 'STREAM', KEYS[at]))['last-generated-id'])
  redis.call('XSETID', KEYS[at], largest)
end
redis.call('HSET', KEYS[1], 'layout', ARGV[2], 'partitions', ARGV[3])
return { 'OK' }
