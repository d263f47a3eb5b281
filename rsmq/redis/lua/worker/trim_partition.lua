-- PURPOSE  Remove entries that every group has settled and that the limits do not keep for a replay.
-- KEYS     1 stream  2 marks zset  3 archived hash  4 removed hash  5.. of each group, in the order of ARGV: retry zset,
--          errors hash, cancels hash, cancelled zset, lease hash
-- ARGV     1 keep_age_ms:int  2 keep_length:int  3 exact:0|1  4 archive:off|required  5.. group names
-- RETURNS  {'OK', removed:int, floor, is_more:0|1 (there is another page)} or {'GROUPS_CHANGED'} or {'NO_GROUPS'}
--          or {'TOO_MANY_PARKED', group} or {'NO_POSITION', archive}: what it has cannot be read, so all is kept
--          (too many: more than 5000, and how often they were charged is not known, or more than 1000 times)
-- WHY      The limit is what every group has been delivered; with a required archive also what the slowest archive has
--          committed, and without any archive nothing is removed. The floor is the oldest entry before the limit that
--          any group still needs: pending, or parked for a retry. Up to it XTRIM removes all that need not be kept for a
--          replay. One message that waits for hours must not keep all behind it: so what would be removed without it is
--          deleted between those that are needed, a page in each call, with the notes about it. `cut` is up to where
--          that was done, `left` how many were needed there; when most of these are settled, it begins anew.
--          Marks (entries ever added -> id, written on each call) count entries without reading them.
-- USES     dict, order, is_id, next_id, whole, replay_start, add_parked, is_parked, delete_settled, forget_old_notes, may_write, can_write
local function less(a, b) return order(a) < order(b) end
local function lower(a, b) return less(a, b) and a or b end
local first, groups, parked, many, waiting = {}, redis.call('XINFO', 'GROUPS', KEYS[1]), {}, {}, 0
if #groups == 0 then return { 'NO_GROUPS' } end
for i = 5, #ARGV do first[ARGV[i]] = 5 * i - 20 end
local stream = dict(redis.call('XINFO', 'STREAM', KEYS[1]))
local limit = next_id(stream['last-generated-id'])
local floor = limit
for i, row in ipairs(groups) do
  local group = dict(row)
  local at = first[group.name] or 0
  local retry, lease = KEYS[at], KEYS[at + 4]
  if not retry then return { 'GROUPS_CHANGED' } end
  limit = lower(next_id(group['last-delivered-id']), limit)
  if group.pending > 0 then floor = lower(redis.call('XPENDING', KEYS[1], group.name)[2], floor) end
  waiting = waiting + group.pending + redis.call('ZCARD', retry)
  local lowest, most = add_parked(parked, retry, lease)
  if most == -1 then return { 'TOO_MANY_PARKED', group.name } end
  floor = lower(lowest or floor, floor)
  many[retry] = most
  groups[i] = group.name
end
if ARGV[4] == 'required' then
  local archives = redis.call('HGETALL', KEYS[3])
  if #archives == 0 then limit = '0-0' end
  for i = 2, #archives, 2 do
    if not is_id(archives[i]) then return { 'NO_POSITION', archives[i - 1] } end
    limit = lower(next_id(archives[i]), limit)
  end
end
floor = lower(floor, limit)

can_write('ZADD ZREMRANGEBYSCORE', KEYS[2], 'XTRIM XDEL', KEYS[1], 'HSET', KEYS[4])
local notes = {}
for _, name in ipairs(less(floor, limit) and groups or {}) do
  local at = first[name]
  can_write('HDEL', KEYS[at + 1], 'HDEL', KEYS[at + 2], 'ZREM', KEYS[at + 3])
  notes[name] = { KEYS[at + 1], KEYS[at + 2], KEYS[at + 3] }
end
local added, keep = stream['entries-added'], tonumber(ARGV[2])
local newest = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
local is_sealed = stream['last-generated-id'] == '18446744073709551615-18446744073709551615' -- it is no entry's id
if added > 0 and not is_sealed and added - tonumber(newest[2] or 0) >= math.max(100, keep / 100) then
  redis.call('ZADD', KEYS[2], added, stream['last-generated-id'])
end
local cut = keep == 0 and limit or replay_start(KEYS[2], limit, keep, ARGV[1], waiting)
local trimmed = redis.call('XTRIM', KEYS[1], 'MINID', ARGV[3] == '1' and '=' or '~', lower(floor, cut))

local deleted, is_more = 0, 0
if less(floor, cut) then
  local known = redis.call('HMGET', KEYS[4], 'cut', 'left')
  local from, left = known[1] or '', math.max(0, (whole(known[2]) or 0) - trimmed)
  if not is_id(from) or less(from, floor) or left > 2 * waiting then from, left = floor, 0 end
  local kept
  deleted, kept, from, is_more = delete_settled(KEYS[1], groups, notes, parked, many, from, cut)
  redis.call('HSET', KEYS[4], 'cut', from, 'left', string.format('%.0f', left + kept))
end
if trimmed + deleted > 0 then -- count_removed must not report these as removed by another client
  local own = whole(redis.call('HGET', KEYS[4], 'own')) or 0
  redis.call('HSET', KEYS[4], 'own', string.format('%.0f', own + trimmed + deleted))
end
for _, name in ipairs(groups) do forget_old_notes(KEYS[1], name, floor) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('(%.0f', added - redis.call('XLEN', KEYS[1])))
return { 'OK', trimmed + deleted, floor, is_more }
