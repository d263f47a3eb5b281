#!lua flags=allow-oom
-- PURPOSE  Take over a page of what is delivered but not settled, oldest first.
-- KEYS     1 stream  2 lease hash  3 retry zset
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 cursor ('0-0' = start)  5 count:int
--          6 min_idle_ms:int (0: all)  7 from: only this consumer's, or '' for anybody's  8 budget:bytes
--          9 reader, or '' in shared distribution
-- RETURNS  {'OK', next cursor ('0-0' = all seen), {lost ids}, {id, attempts, wait_ms, fields, is_ours:0|1}...}
--          or {'STALE_EPOCH'}
-- WHY      The reader is noted, so that the next owner can cut off its blocking read. JUSTID: a claim is no attempt.
--          Lost are ids whose entry somebody deleted. `wait_ms` is > 0 for a message whose retry is not due yet, and
--          `is_ours` says that the owner had it before. Only XAUTOCLAIM bounds a search for the idle among the many.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
  redis.call('HSET', KEYS[2], 'reader', ARGV[9])
end
local count, is_search = tonumber(ARGV[5]), ARGV[7] == '' and ARGV[6] ~= '0'
local rows, cursor, lost, claimed = {}, '0-0', {}, {}
if is_search then
  local page = redis.call('XAUTOCLAIM', KEYS[1], ARGV[3], ARGV[1], ARGV[6], ARGV[4], 'COUNT', count, 'JUSTID')
  cursor, lost = page[1], page[3] or {}
  for i, id in ipairs(page[2]) do rows[i] = redis.call('XPENDING', KEYS[1], ARGV[3], id, id, 1)[1] end
else
  local range = { ARGV[4] == '0-0' and '-' or ARGV[4], '+', count + 1 }
  if ARGV[7] ~= '' then range[4] = ARGV[7] end
  rows = redis.call('XPENDING', KEYS[1], ARGV[3], unpack(range))
  if #rows > count then cursor = table.remove(rows)[1] end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local reply, bytes = { 'OK', cursor, lost }, 0
for i, row in ipairs(rows) do
  local id = row[1]
  if bytes > tonumber(ARGV[8]) then
    reply[2] = id
    -- XAUTOCLAIM has made the rest young: old again, so that the next page finds it
    for j = i, is_search and #rows or 0 do
      redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, rows[j][1], 'IDLE', ARGV[6], 'JUSTID')
    end
    break
  end
  claimed[#claimed + 1] = id
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  if entry then
    for i = 1, #entry[2] do bytes = bytes + #entry[2][i] end
    local due = redis.call('ZSCORE', KEYS[3], id .. '|' .. row[4])
    local is_ours = not is_search and row[2] == ARGV[1]
    local wait = due and math.max(0, tonumber(due) - now) or 0
    reply[#reply + 1] = { id, row[4], wait, entry[2], is_ours and 1 or 0 }
  else
    lost[#lost + 1] = id
  end
end
if not is_search and #claimed > 0 then
  claimed[#claimed + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, unpack(claimed))
end
return reply
