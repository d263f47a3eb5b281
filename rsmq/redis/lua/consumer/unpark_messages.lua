#!lua flags=allow-oom
-- PURPOSE  Deliver parked messages whose retry is due (without key order).
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 limit:int  5 keep:int, of dead letters
--          6..17 a lost body's dlq.* fields
-- RETURNS  {'OK', wait_ms:int until the next (-1: none; at most a day), {id, attempts, fields or '', was_pending:0|1}...}
--          or {'STALE_EPOCH'}; {member, -1, '', 0} is one that names no message, and is removed
-- WHY      XCLAIM FORCE creates the pending entry again under the same id, so the payload never moves. Empty `fields`
--          mean that the entry was deleted meanwhile: it is a dead letter now, written in the same step, so a lost reply
--          loses nothing. A message that was charged another attempt since is left alone. A message that was still
--          pending for its owner keeps its position: if it has a key, a timer runs for it. Due times follow
--          a clock that was set back by a step or a failover, or retries would wait for that long. A member without
--          a count that can be read is a message that is nowhere else: it comes as one that was tried once.
-- USES     bury_lost, follow_clock, is_id, may_write, can_write
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
if redis.call('EXISTS', KEYS[3]) == 0 then return { 'OK', -1 } end
can_write('HSET', KEYS[2], 'ZADD ZREM', KEYS[3], 'XCLAIM XACK', KEYS[1], 'XADD', KEYS[4])
local now = follow_clock(KEYS[2], KEYS[3])
local reply = { 'OK', -1 }
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[4])) do
  local id, attempts = member:match('^([%d-]+)|(.*)$')
  local names_one = id and is_id(id)
  if not names_one or not attempts:match('^%d+$') or #attempts > 15 then attempts = '1' end
  local entry = names_one and redis.call('XRANGE', KEYS[1], id, id)[1]
  local row = names_one and redis.call('XPENDING', KEYS[1], ARGV[3], id, id, 1)[1]
  local was_pending = row and ARGV[2] ~= '' and row[2] == ARGV[1] and 1 or 0
  if not names_one then
    reply[#reply + 1] = { member, -1, '', 0 }
  elseif row and row[4] > tonumber(attempts) then
    -- started since: a failover has lost the first start, but not the repeated one
  elseif entry then
    redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, id, 'RETRYCOUNT', attempts, 'FORCE', 'JUSTID')
    reply[#reply + 1] = { id, tonumber(attempts), entry[2], was_pending }
  elseif not row or row[2] == ARGV[1] then
    bury_lost(KEYS[4], ARGV[5], id, unpack(ARGV, 6, 17))
    redis.call('XACK', KEYS[1], ARGV[3], id)
    reply[#reply + 1] = { id, tonumber(attempts), '', was_pending }
  end
  redis.call('ZREM', KEYS[3], member)
end
local next = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
if #next > 0 then reply[2] = math.min(math.max(0, tonumber(next[2]) - now), 86400000) end
return reply
