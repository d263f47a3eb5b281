#!lua flags=allow-oom
-- PURPOSE  Take over a page of the messages of a leased partition that were delivered but not settled, oldest first.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 dead-letter stream
-- ARGV     1 owner  2 epoch  3 group  4 cursor ('0-0' = start)  5 count:int  6 budget:bytes  7 reader
--          8 keep:int, of dead letters  9..20 a lost body's dlq.* fields  21 trims:0|1 (the topic removes entries itself
--          when it is full)
-- RETURNS  {'OK', next cursor ('0-0' = all seen), {lost ids}, {id, attempts, wait_ms, fields, is_ours:0|1} or
--          {id, 'TRIMMED'}...} or {'STALE_EPOCH'}
-- WHY      XPENDING comes first: it knows the attempts and the last owner. Then the bodies, up to the budget, and then
--          XAUTOCLAIM takes over those that have been looked at: it hands the cursor on to the first one without a body,
--          and names the lost ids, whose entries are deleted. It drops these without a trace, so each becomes a dead
--          letter in the same step, and a lost reply loses nothing. JUSTID: a claim is not an attempt. Bodies whose ids
--          are in a row come with one call, in portions: a portion of large ones must not fill the server's memory.
--          The reader is stored so that the next owner can cut off its blocking read. Its predecessor is kept until the
--          same reader claims again, because a claim that was delayed may come after one by a newer reader. `wait_ms` is
--          > 0 for a message whose retry is not due. `is_ours` is 1 if the owner already had the message.
--          What the topic has trimmed itself is no dead letter: a hundred thousand of them would push all others out.
-- USES     bury_lost, order, follow_clock, may_write, can_write
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch', 'reader')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
local rows = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[4], '+', ARGV[5])
local left, largest, portion, at, bodies, lost, trimmed = tonumber(ARGV[6]), 1, 1, 0, {}, {}, {}
local function note_gone(id)
  local oldest = ARGV[21] == '1' and redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)
  if oldest and (not oldest[1] or order(id) < order(oldest[1][1])) then
    trimmed[#trimmed + 1] = { id, 'TRIMMED' }
  else
    lost[#lost + 1] = id
  end
end
while at < #rows and left >= 0 do
  local last = math.min(at + portion, #rows)
  for _, entry in ipairs(redis.call('XRANGE', KEYS[1], rows[at + 1][1], rows[last][1], 'COUNT', last - at)) do
    bodies[entry[1]] = entry[2]
  end
  local are_in_a_row = true
  while at < last and left >= 0 do
    at = at + 1
    local id = rows[at][1]
    if not bodies[id] then
      are_in_a_row = false
      local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
      bodies[id] = entry and entry[2]
    end
    local size = 0
    for _, part in ipairs(bodies[id] or {}) do size = size + #part end
    if not bodies[id] then note_gone(id) end
    left, largest = left - size, math.max(largest, size)
  end
  portion = are_in_a_row and math.max(1, math.min(2 * portion, 64, math.floor(left / largest))) or 1
end
can_write('XAUTOCLAIM', KEYS[1], 'HSET', KEYS[2], 'ZADD ZREM', KEYS[3])
if #lost > 0 then can_write('XADD', KEYS[4]) end
local has_parked = redis.call('EXISTS', KEYS[3]) == 1
local now = has_parked and follow_clock(KEYS[2], KEYS[3])
local cursor = '0-0'
for _, id in ipairs(lost) do
  bury_lost(KEYS[4], ARGV[8], id, unpack(ARGV, 9, 20))
end
redis.call('HSET', KEYS[2], 'reader', ARGV[7], 'before', lease[3] ~= ARGV[7] and lease[3] or '')
if at > 0 then
  cursor = redis.call('XAUTOCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, ARGV[4], 'COUNT', at, 'JUSTID')[1]
end
local reply = { 'OK', cursor, lost }
for _, row in ipairs(trimmed) do reply[#reply + 1] = row end
for i = 1, at do
  local id, attempts = rows[i][1], rows[i][4]
  local parked = id .. '|' .. attempts
  if bodies[id] then
    local due = has_parked and redis.call('ZSCORE', KEYS[3], parked)
    local wait = due and math.max(0, tonumber(due) - now) or 0
    reply[#reply + 1] = { id, attempts, wait, bodies[id], rows[i][2] == ARGV[1] and 1 or 0 }
  elseif has_parked then
    redis.call('ZREM', KEYS[3], parked)
  end
end
return reply
