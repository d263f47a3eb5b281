#!lua flags=allow-oom
-- PURPOSE  Take over a page of the messages of a leased partition as claim_pending does, without their bodies.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream
-- ARGV     1 owner  2 epoch  3 group  4 cursor  5 count:int  6 trims:0|1 (the topic removes entries itself when it is
--          full)  7 reader  8 keep:int, of dead letters  9..20 a lost body's dlq.* fields
-- RETURNS  {'OK', next cursor ('0-0' = all seen), {lost id...}, {trimmed id...}, {id, attempts, wait_ms, is_ours:0|1,
--          id, ...}} or {'STALE_EPOCH'}
-- WHY      A large backlog comes faster so: its bodies are read by plain commands, and most of them are not kept. What
--          XAUTOCLAIM finds deleted becomes a dead letter in the same step, unless the topic has trimmed it.
-- USES     bury_lost, order, follow_clock, may_write, can_write
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch', 'reader')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
local rows = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], '+', ARGV[5])
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local first = order(oldest and oldest[1] or '0-0')
can_write('XAUTOCLAIM', KEYS[1], 'HSET', KEYS[2], 'ZADD ZREM', KEYS[3], 'XADD', KEYS[4])
local has_parked = redis.call('EXISTS', KEYS[3]) == 1
local now = has_parked and follow_clock(KEYS[2], KEYS[3])
redis.call('HSET', KEYS[2], 'reader', ARGV[7], 'before', lease[3] ~= ARGV[7] and lease[3] or '')
local cursor, gone, lost, trimmed, found = '0-0', {}, {}, {}, {}
if #rows > 0 then
  local page = redis.call('XAUTOCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, ARGV[4], 'COUNT', #rows, 'JUSTID')
  cursor = page[1]
  for _, id in ipairs(page[3]) do
    gone[id] = true
    if ARGV[6] == '1' and (not oldest or order(id) < first) then
      trimmed[#trimmed + 1] = id
    else
      bury_lost(KEYS[4], ARGV[8], id, unpack(ARGV, 9, 20))
      lost[#lost + 1] = id
    end
  end
end
for _, row in ipairs(rows) do
  local id, attempts, n = row[1], row[4], #found
  local parked = has_parked and id .. '|' .. attempts
  if not gone[id] then
    local due = has_parked and redis.call('ZSCORE', KEYS[3], parked)
    found[n + 1], found[n + 2] = id, attempts
    found[n + 3] = due and math.max(0, tonumber(due) - now) or 0
    found[n + 4] = row[2] == ARGV[1] and 1 or 0
  elseif has_parked then
    redis.call('ZREM', KEYS[3], parked)
  end
end
return { 'OK', cursor, lost, trimmed, found }
