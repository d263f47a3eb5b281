-- PURPOSE  Make the streams that follow a partition of a cluster, or seal it.
-- KEYS     1 stream  2 removed hash  3.. streams of the partitions that follow
-- ARGV     1 make or seal
-- RETURNS  {'OK'}, {'GONE', stream} (a stream of those that follow is not there) or {'GROUPS', group} (it is not in every
--          partition that follows)
-- WHY      As `resize_topic`, which seals all at once and changes the layout with it: on a cluster that is in another
--          slot. The layout says before that partitions are being sealed, and after the last one that messages go to those
--          that follow; a call that is repeated, or comes late, meets a sealed stream. The streams that follow are made
--          before that: a caller that sleeps until its topic was deleted and made again finds none, and seals nothing.
-- USES     dict, may_write, can_write
local largest = '18446744073709551615-18446744073709551615'
local function make(key) -- no other command makes an empty stream
  if redis.call('EXISTS', key) == 1 then return end
  if not redis.acl_check_cmd('XGROUP', 'DESTROY', key, 'sealed') then
    error({ err = 'NOPERM this user may not make ' .. key .. ': it has no right to XGROUP DESTROY' })
  end
  redis.call('XGROUP', 'CREATE', key, 'sealed', '$', 'MKSTREAM')
  redis.call('XGROUP', 'DESTROY', key, 'sealed')
end
if ARGV[1] == 'make' then
  for at = 3, #KEYS do make(KEYS[at]) end
  return { 'OK' }
end
local wanted = {}
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do wanted[dict(row).name] = true end
end
for at = 3, #KEYS do
  if redis.call('EXISTS', KEYS[at]) == 0 then return { 'GONE', KEYS[at] } end
  local known = {}
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[at])) do known[dict(row).name] = true end
  for name in pairs(wanted) do
    if not known[name] then return { 'GROUPS', name } end
  end
end
can_write('XSETID', KEYS[1], 'HSET', KEYS[2])
make(KEYS[1])
local last = dict(redis.call('XINFO', 'STREAM', KEYS[1]))['last-generated-id']
if last ~= largest then
  redis.call('HSET', KEYS[2], 'end', last)
  redis.call('XSETID', KEYS[1], largest)
end
return { 'OK' }
