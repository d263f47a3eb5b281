#!lua flags=allow-oom
-- PURPOSE  Take over a page of what is delivered but not settled, oldest first.
-- KEYS     1 stream  2 lease hash  3 retry zset
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 cursor ('0-0' = start)  5 count:int  6 min_idle_ms:int
--          7 from: only this consumer's, or '' for anybody's  8 budget:bytes  9 reader, or '' in shared distribution
-- RETURNS  {'OK', next cursor ('0-0' = all seen), {lost ids}, {id, attempts, wait_ms, fields}...} or {'STALE_EPOCH'}
-- WHY      The reader is noted, so that the next owner can cut off its blocking read. JUSTID: a claim is no attempt.
--          Lost are ids whose entry somebody deleted. `wait_ms` is > 0 for a message whose retry is not due yet.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
  redis.call('HSET', KEYS[2], 'reader', ARGV[9])
end
local ids, cursor, lost = {}, '0-0', {}
if ARGV[7] == '' then
  local page = redis.call('XAUTOCLAIM', KEYS[1], ARGV[3], ARGV[1], ARGV[6], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
  cursor, ids, lost = page[1], page[2], page[3] or {}
else
  local start = ARGV[4] == '0-0' and '-' or ARGV[4]
  local page = redis.call('XPENDING', KEYS[1], ARGV[3], start, '+', ARGV[5] + 1, ARGV[7])
  for i = 1, math.min(#page, tonumber(ARGV[5])) do ids[i] = page[i][1] end
  if #page > tonumber(ARGV[5]) then cursor = page[#page][1] end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local reply, bytes = { 'OK', cursor, lost }, 0
for i, id in ipairs(ids) do
  if bytes > tonumber(ARGV[8]) then
    reply[2] = id
    -- XAUTOCLAIM has made the rest young: old again, so that the next page finds it
    for j = i, ARGV[7] == '' and #ids or 0 do
      redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, ids[j], 'IDLE', ARGV[6], 'JUSTID')
    end
    break
  end
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  if ARGV[7] ~= '' then redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, id, 'JUSTID') end
  local row = redis.call('XPENDING', KEYS[1], ARGV[3], id, id, 1)[1]
  if not entry then
    lost[#lost + 1] = id
  elseif row then
    for i = 1, #entry[2] do bytes = bytes + #entry[2][i] end
    local due = redis.call('ZSCORE', KEYS[3], id .. '|' .. row[4])
    reply[#reply + 1] = { id, row[4], due and math.max(0, tonumber(due) - now) or 0, entry[2] }
  end
end
return reply
