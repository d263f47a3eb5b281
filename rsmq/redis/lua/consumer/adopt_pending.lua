#!lua flags=allow-oom
-- PURPOSE  Shared distribution: claim a page of what one member has, or of what nobody has touched for a lease.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream
-- ARGV     1 member  2 group  3 cursor ('0-0' = start)  4 count:int  5 budget:bytes
--          6 from: only this member's messages; '' searches those of all  7 min_idle_ms:int, of a search
--          8 the server's time that a search expects:ms  9 keep:int, of dead letters
--          10..21 a lost body's dlq.* fields, then for members with another min_idle_ms: member, min_idle_ms:int
-- RETURNS  {'OK', next cursor ('0-0' = all seen), {lost ids}, {id, attempts, wait_ms, fields, is_ours:0|1}...}
--          or {'CLOCK', now_ms}: a search expected another time, and has claimed nothing
-- WHY      A message is idle when its member did not touch it for its own lease, which may be longer than that of the
--          caller: XAUTOCLAIM has one idle time for all and names no last owner, so each row is looked at, ten times
--          `count` of them. After a step of the clock every message seems to be idle, until its member has touched it
--          again. The dead letters of lost ids, `wait_ms` and `is_ours`: as in claim_pending.
-- USES     bury_lost, follow_clock, may_write, can_write
local count, is_search, min_idle, patience = tonumber(ARGV[4]), ARGV[6] == '', tonumber(ARGV[7]), {}
if is_search then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if math.abs(now - ARGV[8]) > min_idle / 2 then return { 'CLOCK', now } end
end
for i = 22, #ARGV, 2 do patience[ARGV[i]] = tonumber(ARGV[i + 1]) end
local most = is_search and 10 * count or count
local range = { ARGV[3], '+', most + 1 }
if ARGV[6] ~= '' then range[4] = ARGV[6] end
local rows, cursor, lost, claimed = redis.call('XPENDING', KEYS[1], ARGV[2], unpack(range)), '0-0', {}, {}
if #rows > most then cursor = table.remove(rows)[1] end
can_write('XCLAIM XACK', KEYS[1], 'HSET', KEYS[2], 'ZADD ZREM', KEYS[3])
local now = redis.call('EXISTS', KEYS[3]) == 1 and follow_clock(KEYS[2], KEYS[3]) or 0
local reply, bytes = { 'OK', cursor, lost }, 0
for _, row in ipairs(rows) do
  local id = row[1]
  if bytes > tonumber(ARGV[5]) or #claimed + #lost >= count then
    reply[2] = id
    break
  end
  if not is_search or row[3] >= (patience[row[2]] or min_idle) then
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    if entry then
      claimed[#claimed + 1] = id
      for i = 1, #entry[2] do bytes = bytes + #entry[2][i] end
      local due = redis.call('ZSCORE', KEYS[3], id .. '|' .. row[4])
      local is_ours = not is_search and row[2] == ARGV[1]
      local wait = due and math.max(0, tonumber(due) - now) or 0
      reply[#reply + 1] = { id, row[4], wait, entry[2], is_ours and 1 or 0 }
    else
      if #lost == 0 then can_write('XADD', KEYS[4]) end
      bury_lost(KEYS[4], ARGV[9], id, unpack(ARGV, 10, 21))
      redis.call('XACK', KEYS[1], ARGV[2], id)
      redis.call('ZREM', KEYS[3], id .. '|' .. row[4])
      lost[#lost + 1] = id
    end
  end
end
if #claimed > 0 then
  claimed[#claimed + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[1], 0, unpack(claimed))
end
return reply
