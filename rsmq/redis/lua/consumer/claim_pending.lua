#!lua flags=allow-oom
-- PURPOSE  Take over a page of the messages that were delivered but not settled, oldest first.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 cursor ('0-0' = start)  5 count:int
--          6 min_idle_ms:int (0: all)  7 from: only this consumer's messages, or '' for all  8 budget:bytes
--          9 reader; of a search, the server's time that it expects:ms, or ''  10 keep:int, of dead letters
--          11..22 a lost body's dlq.* fields, then for consumers with another min_idle_ms: consumer, min_idle_ms:int
-- RETURNS  {'OK', next cursor ('0-0' = all seen), {lost ids}, {id, attempts, wait_ms, fields, is_ours:0|1}...}
--          or {'STALE_EPOCH'} or {'CLOCK', now_ms}: a search expected another time, and has claimed nothing
-- WHY      The reader is stored so that the next owner can cut off its blocking read. Its predecessor is kept until the
--          same reader claims again, because a claim that was delayed may come after one by a newer reader. JUSTID: a
--          claim is not an attempt. Lost ids were pending, but their entries are deleted: XCLAIM would drop them without
--          a trace, so each becomes a dead letter in the same step, and a lost reply loses nothing. `wait_ms` is > 0 for
--          a message whose retry is not due. `is_ours` is 1 if the owner already had the message. In shared distribution
--          a message is idle when its consumer did not touch it for its own lease, which may be longer than that of the
--          caller. After a step of the clock every message seems to be idle, until its member has touched it again.
--          A search reads ten times `count` rows: that takes as long as XAUTOCLAIM, which names no last owner.
-- USES     follow_clock
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch', 'reader')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
  redis.call('HSET', KEYS[2], 'reader', ARGV[9], 'before', lease[3] ~= ARGV[9] and lease[3] or '')
end
local count, is_search, patience = tonumber(ARGV[5]), ARGV[7] == '' and ARGV[6] ~= '0', {}
if is_search and ARGV[9] ~= '' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if math.abs(now - ARGV[9]) > ARGV[6] / 2 then return { 'CLOCK', now } end
end
for i = 23, #ARGV, 2 do patience[ARGV[i]] = tonumber(ARGV[i + 1]) end
local most = is_search and 10 * count or count
local range = { ARGV[4] == '0-0' and '-' or ARGV[4], '+', most + 1 }
if ARGV[7] ~= '' then range[4] = ARGV[7] end
local rows, cursor, lost, claimed = redis.call('XPENDING', KEYS[1], ARGV[3], unpack(range)), '0-0', {}, {}
if #rows > most then cursor = table.remove(rows)[1] end
local now = redis.call('EXISTS', KEYS[3]) == 1 and follow_clock(KEYS[2], KEYS[3]) or 0
local reply, bytes = { 'OK', cursor, lost }, 0
for _, row in ipairs(rows) do
  local id = row[1]
  if bytes > tonumber(ARGV[8]) or #claimed + #lost >= count then
    reply[2] = id
    break
  end
  if not is_search or row[3] >= (patience[row[2]] or tonumber(ARGV[6])) then
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    if entry then
      claimed[#claimed + 1] = id
      for i = 1, #entry[2] do bytes = bytes + #entry[2][i] end
      local due = redis.call('ZSCORE', KEYS[3], id .. '|' .. row[4])
      local is_ours = not is_search and row[2] == ARGV[1]
      local wait = due and math.max(0, tonumber(due) - now) or 0
      reply[#reply + 1] = { id, row[4], wait, entry[2], is_ours and 1 or 0 }
    else
      redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[10], '*', 'dlq.origin', id, unpack(ARGV, 11, 22))
      redis.call('XACK', KEYS[1], ARGV[3], id)
      redis.call('ZREM', KEYS[3], id .. '|' .. row[4])
      lost[#lost + 1] = id
    end
  end
end
if #claimed > 0 then
  claimed[#claimed + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, unpack(claimed))
end
return reply
