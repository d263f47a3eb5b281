-- PURPOSE  Remove what every group has settled and nobody needs for a replay.
-- KEYS     1 stream  2 marks zset  3 archived hash  4 removed hash  5.. retry zset of each group, in the order of ARGV
-- ARGV     1 keep_age_ms:int  2 keep_length:int  3 exact:0|1  4 archive:off|required  5.. group names
-- RETURNS  {'OK', trimmed:int, floor} or {'GROUPS_CHANGED'} or {'NO_GROUPS'} or {'TOO_MANY_PARKED', group}
-- WHY      The floor is the oldest entry that any group still needs: not delivered, pending, or parked for a retry;
--          with an archive required, also what the slowest archive has not committed: all of it while there is none.
--          Marks (entries ever added -> id, written as it goes) let it count entries without reading bodies.
local function parts(id)
  local ms, seq = id:match('^(%d+)%-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local function less(a, b)
  local am, as = parts(a)
  local bm, bs = parts(b)
  return am < bm or (am == bm and as < bs)
end
local function after(id)
  local ms, seq = parts(id)
  return string.format('%.0f-%.0f', ms, seq + 1)
end
local function dict(flat)
  local out = {}
  for i = 1, #flat, 2 do out[flat[i]] = flat[i + 1] end
  return out
end

local known, groups = {}, redis.call('XINFO', 'GROUPS', KEYS[1])
if #groups == 0 then return { 'NO_GROUPS' } end
for i = 5, #ARGV do known[ARGV[i]] = KEYS[i] end
local stream = dict(redis.call('XINFO', 'STREAM', KEYS[1]))
local floor = after(stream['last-generated-id'])
for _, row in ipairs(groups) do
  local group = dict(row)
  local retry = known[group.name]
  if not retry then return { 'GROUPS_CHANGED' } end
  local needed = after(group['last-delivered-id'])
  if group.pending > 0 then
    local oldest = redis.call('XPENDING', KEYS[1], group.name)[2]
    if less(oldest, needed) then needed = oldest end
  end
  if redis.call('ZCARD', retry) > 5000 then return { 'TOO_MANY_PARKED', group.name } end
  for _, member in ipairs(redis.call('ZRANGE', retry, 0, -1)) do
    local id = member:match('^(.-)|')
    if less(id, needed) then needed = id end
  end
  if less(needed, floor) then floor = needed end
end
if ARGV[4] == 'required' then
  local archives = redis.call('HGETALL', KEYS[3])
  if #archives == 0 then floor = '0-0' end
  for i = 2, #archives, 2 do
    local needed = after(archives[i])
    if less(needed, floor) then floor = needed end
  end
end

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
    if less(marks[i], floor) then
      if settled == 0 then settled = tonumber(marks[i + 1]) end
      if tonumber(marks[i + 1]) <= settled - keep then
        if less(cut, marks[i]) then cut = marks[i] end
        break
      end
    end
  end
  if less(floor, cut) then cut = floor end
end
local trimmed = redis.call('XTRIM', KEYS[1], 'MINID', ARGV[3] == '1' and '=' or '~', cut)
if trimmed > 0 then -- whoever counts what is gone must not take it for somebody else's deed
  redis.call('HSET', KEYS[4], 'own', string.format('%.0f', (redis.call('HMGET', KEYS[4], 'own')[1] or 0) + trimmed))
end
local stale = added - redis.call('XLEN', KEYS[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(' .. stale)
return { 'OK', trimmed, floor }
