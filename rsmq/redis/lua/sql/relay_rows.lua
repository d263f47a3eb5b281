-- PURPOSE  Append rows of an outbox to one partition, except those that are appended already.
-- KEYS     1 stream  2 delayed zset  3 relayed hash  4 unique hash  then dedup strings
-- ARGV     1 outbox  2 turn (text of fixed width, rising)  3 max_length:int  4 on_full:reject|trim
--          5 ids of rows (16 bytes each) that are deleted from the outbox
--          then per row: id (16 bytes), due:ms, '+' and ms from now (below 0: overdue), or '', n:int,
--          n values (field, value, ...). Of a message whose id was given, n is as in given_id
-- RETURNS  {'OK'|'FULL', appended:int, skipped:int, ids of the rows that are appended and not known to be deleted}, at
--          last 'FOREIGN' if another client has written into the hash: it begins anew; or {'STALE'}. A row without room,
--          or before which more is due than one call moves, and those after it count as neither
-- WHY      The ids are stored together with the messages, until the relay says that their rows are deleted. So a relay
--          that dies between the two repeats nothing, whatever the order in which rows become visible. Each call has a
--          turn of its own: a late call of an earlier relay, or one whose reply was lost, is refused.
--          A message whose id was given, and that was stored before, counts as skipped, and is remembered like a row.
--          A row with a due time waits in the delayed set also when it is overdue: there it comes behind what was due
--          before it. What is due goes into the stream before a row without a time, and at the end.
-- USES     dict, is_id, name_record, may_write, can_write, can_append, delay_score, given_id, remember_id, release_due, kept_rows
local max, trim = tonumber(ARGV[3]), ARGV[4] == 'trim'
local found = redis.call('HMGET', KEYS[3], 'turn|' .. ARGV[1], 'rows|' .. ARGV[1])
local is_turn = found[1] and #found[1] == #ARGV[2] and found[1]:match('^%d+$')
if is_turn and ARGV[2] <= found[1] then return { 'STALE' } end
local is_foreign = found[1] and not is_turn or found[2] and #found[2] % 16 ~= 0
can_write('XADD', KEYS[1], 'ZADD ZREM', KEYS[2], 'HSET', KEYS[3], 'HSET', KEYS[4])
can_append(KEYS[1])
for i = 5, #KEYS do can_write('SET', KEYS[i]) end
local kept, known = kept_rows(found[2], ARGV[5])
local room = math.huge
if max > 0 and not trim then room = max - redis.call('XLEN', KEYS[1]) end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function first_due() return tonumber(redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]) end
local next_due = first_due()
-- move what is due; false: there is more of it
local function release()
  if not next_due or next_due > now then return true end
  local moved, is_full = release_due(KEYS[1], KEYS[2], KEYS[4], now, 1000, max, ARGV[4])
  room, next_due = room - moved, first_due()
  return is_full == 1 or not next_due or next_due > now
end
local word, appended, skipped, at, trouble = 'OK', 0, 0, 6, nil
while at <= #ARGV do
  local id, due, n = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local given, is_taken
  if not n then n, given, is_taken = given_id(ARGV[at + 2]) end
  local left = ARGV[at + 1]:match('^%+(%-?%d+)$')
  if left then due = now + tonumber(left) end
  local reply = {}
  if known[id] or is_taken then
    skipped = skipped + 1
  elseif due then
    local packed = {}
    for i = at + 3, at + n + 2 do packed[#packed + 1] = struct.pack('>I4', #ARGV[i]) .. ARGV[i] end
    reply = redis.pcall('ZADD', KEYS[2], delay_score(KEYS[2], due), table.concat(packed))
    next_due = math.min(next_due or due, due)
  elseif not release() then
    break
  elseif room <= 0 then
    word = 'FULL'
    break
  elseif max > 0 and trim then
    reply = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(ARGV, at + 3, at + n + 2))
  else
    reply = redis.pcall('XADD', KEYS[1], '*', unpack(ARGV, at + 3, at + n + 2))
    room = room - 1
  end
  if type(reply) == 'table' and reply.err then
    trouble = reply
    break
  end
  if given and not known[id] and not is_taken then remember_id(given, reply, due, now) end
  if not known[id] then
    appended, kept[#kept + 1], known[id] = appended + (is_taken and 0 or 1), id, true
  end
  at = at + n + 3
end
if trouble and appended == 0 then return trouble end
if not trouble and word == 'OK' then release() end
local rows = table.concat(kept)
redis.call('HSET', KEYS[3], 'turn|' .. ARGV[1], ARGV[2], 'rows|' .. ARGV[1], rows)
return trouble or { word, appended, skipped, rows, is_foreign and 'FOREIGN' or nil }
