-- PURPOSE  Replace the subscriptions of an MQTT client: filters that are a topic name under that name, where a router
--          looks it up; all others, and names with many subscribers, in what every router follows.
-- KEYS     1 subscriptions hash  2 changes stream  3 names hash  4 followed hash  5 mark
--          6 messages that the new ones of this call do not meet
-- ARGV     1 client  2 epoch  3 its whole list ('[]' = none, '' = its session ends)  4 changes to keep:int
--          5 those messages (JSON, '' = none)  6 token of this call  7 their ttl_ms  8 1 = only for its own entry
-- RETURNS  'OK', 'SHARED' (it has had shared ones), 'NONE' (none to remove, or to note as away), 'STALE_EPOCH', or
--          'LOST' (this connection has no entry, nor has a newer one)
-- WHY      The whole list is written, so applying it twice is harmless. A connection that was taken over writes
--          nothing any more: each connect leaves an entry with its epoch, which goes with the session. List, names,
--          changes and mark are in one slot and change in one step, so no failover parts them. The mark says:
--          subscriptions that are looked up, state of the names, number of the last change, state of what is followed. No
--          two states are called the same, also not after a failover or when this call comes again: what was read under a
--          mark is true while that is there. Changes have numbers without gaps, so that a reader which missed some knows
--          it. Where another client has written something else, there is no older epoch and no number. The list of a client
--          that is away, which ends with 0, was read before: where it is removed meanwhile, it does not come back. A
--          client that has left its shares may have letters of them, which go on when its session ends: `!` says so.
-- USES     whole, may_write, dict, can_append, parted_list, change_name
local old = redis.call('HGET', KEYS[1], ARGV[1])
local epoch, mark_left, was = (old or ''):match('^(%d+)(!?)|(.*)$')
if (whole(epoch) or 0) > tonumber(ARGV[2]) then return 'STALE_EPOCH' end
if ARGV[8] == '1' and epoch ~= ARGV[2] then return 'LOST' end
local list, stays = ARGV[3] ~= '[]' and ARGV[3] or '', ARGV[3] ~= ''
if not old and (not stays or list:sub(-3) == ',0]') then return 'NONE' end
local had_shares = old and (mark_left == '!' or old:find('"$share/', 1, true))
local entry = ARGV[2] .. (had_shares and not list:find('"$share/', 1, true) and '!|' or '|') .. list
local reply = had_shares and 'SHARED' or list == (was or '') and list == '' and 'NONE' or 'OK'
may_write('HSET HDEL', KEYS[1])
if stays and (was or '') == list then
  redis.call('HSET', KEYS[1], ARGV[1], entry)
  return reply
end
local had, others = parted_list(was or '')
local wanted, followed = parted_list(list)
local edits, changes, grown, has_new = {}, {}, nil, false
for name in pairs(had) do
  if not wanted[name] then
    local by = change_name(KEYS[3], KEYS[4], name, ARGV[1], nil, true, edits, changes)
    grown = by and (grown or 0) + by or grown
  end
end
for name, options in pairs(wanted) do
  if had[name] ~= options then
    local is_new = ARGV[5] ~= '' and not had[name]
    has_new = has_new or is_new
    local flagged = options .. (is_new and '!' .. ARGV[6] or '')
    local by = change_name(KEYS[3], KEYS[4], name, ARGV[1], flagged, had[name], edits, changes)
    grown = by and (grown or 0) + by or grown
  end
end
if followed ~= others then
  edits[#edits + 1] = followed ~= '' and { 'HSET', KEYS[4], ARGV[1], followed } or { 'HDEL', KEYS[4], ARGV[1] }
  changes[#changes + 1] = { ARGV[1], followed }
end

local mark, time = redis.call('GET', KEYS[5]) or '', redis.call('TIME')
local count, names, number, state = mark:match('^(%d+):([^:]*):(%d+):([^:]*)$')
local now = time[1] .. '.' .. time[2] .. '.' .. ARGV[6]
may_write('SET', KEYS[5], 'HSET HDEL', KEYS[3])
if has_new then may_write('SET', KEYS[6]) end
if changes[1] then
  redis.call('XLEN', KEYS[2])
  redis.call('HLEN', KEYS[4])
  may_write('XADD', KEYS[2], 'HSET HDEL', KEYS[4])
  can_append(KEYS[2])
end
redis.call(unpack(stays and { 'HSET', KEYS[1], ARGV[1], entry } or { 'HDEL', KEYS[1], ARGV[1] }))
for _, each in ipairs(edits) do redis.call(unpack(each)) end
if has_new then redis.call('SET', KEYS[6], ARGV[5], 'PX', ARGV[7]) end
number = whole(number) or 0
for i, each in ipairs(changes) do
  local change = { 'n', string.format('%.0f', number + i), 'c', each[1], 'v', each[2] }
  if ARGV[5] ~= '' and each[2] ~= '' then change[7], change[8] = 'b', ARGV[5] end
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', unpack(change))
end
if grown then names = now end
if changes[1] then state = now end
count = math.max((whole(count) or 0) + (grown or 0), 0)
redis.call('SET', KEYS[5], string.format('%.0f:%s:%.0f:%s', count, names or '', number + #changes, state or ''))
return reply
