-- PURPOSE  Deliver parked messages whose retry is due (no key order).
-- KEYS     1 stream  2 lease hash  3 retry zset
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 limit:int
-- RETURNS  {'OK', wait_ms:int until the next (-1: none), {id, attempts, fields or '', was_pending:0|1}...} or {'STALE_EPOCH'}
-- WHY      XCLAIM FORCE re-creates the pending entry under the same id: the payload never moves. An empty `fields`
--          means that somebody deleted the entry meanwhile. One that was charged another attempt since is left alone.
--          One that its owner had pending waits in its place: there is a timer for it, if it has a key.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local reply = { 'OK', -1 }
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[4])) do
  local id, attempts = member:match('^(.-)|(%d+)$')
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  local row = redis.call('XPENDING', KEYS[1], ARGV[3], id, id, 1)[1]
  local was_pending = row and ARGV[2] ~= '' and row[2] == ARGV[1] and 1 or 0
  if row and row[4] > tonumber(attempts) then
    -- started since: a failover has forgotten that, but not the start that somebody repeated
  elseif entry then
    redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, id, 'RETRYCOUNT', attempts, 'FORCE', 'JUSTID')
    reply[#reply + 1] = { id, tonumber(attempts), entry[2], was_pending }
  else
    reply[#reply + 1] = { id, tonumber(attempts), '', was_pending }
  end
  redis.call('ZREM', KEYS[3], member)
end
local next = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
if #next > 0 then reply[2] = math.max(0, tonumber(next[2]) - now) end
return reply
