-- PURPOSE  Remove entries that every group has settled and that the limits do not keep for a replay.
-- KEYS     1 stream  2 marks zset  3 archived hash  4 removed hash  5.. retry zset of each group, in the order of ARGV
-- ARGV     1 keep_age_ms:int  2 keep_length:int  3 exact:0|1  4 archive:off|required  5.. group names
-- RETURNS  {'OK', trimmed:int, floor} or {'GROUPS_CHANGED'} or {'NO_GROUPS'} or {'TOO_MANY_PARKED', group}
--          or {'NO_POSITION', archive}: what it has cannot be read, so all is kept
-- WHY      The floor is the oldest entry that any group still needs: undelivered, pending, or parked for a retry. With
--          a required archive it is also the oldest entry that the slowest archive has not committed; without any
--          archive nothing is trimmed. Marks (entries ever added -> id, written on each call) count entries without
--          reading them.
-- USES     dict, order, is_id, next_id, can_write
local function less(a, b) return order(a) < order(b) end
local function lower(a, b) return less(a, b) and a or b end
local known, groups = {}, redis.call('XINFO', 'GROUPS', KEYS[1])
if #groups == 0 then return { 'NO_GROUPS' } end
for i = 5, #ARGV do known[ARGV[i]] = KEYS[i] end
local stream = dict(redis.call('XINFO', 'STREAM', KEYS[1]))
local floor = next_id(stream['last-generated-id'])
for _, row in ipairs(groups) do
  local group = dict(row)
  local retry = known[group.name]
  if not retry then return { 'GROUPS_CHANGED' } end
  floor = lower(next_id(group['last-delivered-id']), floor)
  if group.pending > 0 then floor = lower(redis.call('XPENDING', KEYS[1], group.name)[2], floor) end
  if redis.call('ZCARD', retry) > 5000 then return { 'TOO_MANY_PARKED', group.name } end
  for _, member in ipairs(redis.call('ZRANGE', retry, 0, -1)) do
    local id = member:match('^([%d-]+)|')
    if id and is_id(id) then floor = lower(id, floor) end -- what names no entry needs none
  end
end
if ARGV[4] == 'required' then
  local archives = redis.call('HGETALL', KEYS[3])
  if #archives == 0 then floor = '0-0' end
  for i = 2, #archives, 2 do
    if not is_id(archives[i]) then return { 'NO_POSITION', archives[i - 1] } end
    floor = lower(next_id(archives[i]), floor)
  end
end

can_write('ZADD ZREMRANGEBYSCORE', KEYS[2], 'XTRIM', KEYS[1], 'HSET', KEYS[4])
local added, keep = stream['entries-added'], tonumber(ARGV[2])
local newest = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
if added > 0 and added - tonumber(newest[2] or 0) >= math.max(100, keep / 100) then
  redis.call('ZADD', KEYS[2], added, stream['last-generated-id'])
end
local cut = '0-0'
if keep == 0 then
  cut = floor
else
  local time = redis.call('TIME')
  cut = string.format('%.0f-0', math.max(0, time[1] * 1000 - ARGV[1]))
  local settled = 0
  local marks = redis.call('ZREVRANGE', KEYS[2], 0, 999, 'WITHSCORES')
  for i = 1, #marks, 2 do
    if is_id(marks[i]) and less(marks[i], floor) then
      if settled == 0 then settled = tonumber(marks[i + 1]) end
      if tonumber(marks[i + 1]) <= settled - keep then
        if less(cut, marks[i]) then cut = marks[i] end
        break
      end
    end
  end
  cut = lower(floor, cut)
end
local trimmed = redis.call('XTRIM', KEYS[1], 'MINID', ARGV[3] == '1' and '=' or '~', cut)
if trimmed > 0 then -- count_removed must not report these as removed by another client
  redis.call('HSET', KEYS[4], 'own', string.format('%.0f', (tonumber(redis.call('HGET', KEYS[4], 'own')) or 0) + trimmed))
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('(%.0f', added - redis.call('XLEN', KEYS[1])))
return { 'OK', trimmed, floor }
