-- PURPOSE  Store a message, at once or until it is due, if no other one has its name.
-- KEYS     1 stream  2 dedup string of this message id  3 unique hash  4 delayed zset
--          5 dedup string of the message to replace  then the cancels hash of each group in ARGV
-- ARGV     1 max_length:int  2 on_full:reject|trim  3 window_ms:int  4 due: '' or as for delay_message  5 name
--          6 till: settled, started, or ms from now  7 seen: the record of a holder that has ended, or is replaced
--          8 how: keep, or replace (the one that was seen)  9 message id
--          10 groups:int, that many names, then field, value, ...
-- RETURNS  {'OK', stream id or due_ms, a record that could not be read}, {'DUPLICATE', the same, -1}, {'FULL'} or {'HELD', now_ms, record, till,
--          message id, stream id or '' (delayed), is_there:0|1, packed entry, group, ...}
-- WHY      What has ended holds no name: where a message is says so, and no settlement knows of names. The caller looks,
--          group by group, and decides. What has ended stays so; then the same record suffices here. What is replaced
--          must not have been delivered, which is checked here, where it becomes cancelled.
-- USES     dict, order, is_id, name_record, may_write, can_write, can_append, delay_score
local known, time = redis.call('GET', KEYS[2]), redis.call('TIME')
if known then return { 'DUPLICATE', known, -1 } end
local now, due = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[4])
if ARGV[4]:sub(1, 1) == '+' then due = now + due end
local first, marks = 11 + ARGV[10], {}
for i = 11, first - 1 do marks[ARGV[i]] = KEYS[i - 5] end
local max = tonumber(ARGV[1])
local is_full = not due and max > 0 and ARGV[2] ~= 'trim' and redis.call('XLEN', KEYS[1]) >= max

local record = redis.call('HGET', KEYS[3], ARGV[5])
may_write('SET', KEYS[2], 'HSET', KEYS[3])
can_write('XADD', KEYS[1], 'ZADD ZREM', KEYS[4])
local held, holder, id, packed = name_record(record or '')
if held and (record ~= ARGV[7] or ARGV[8] == 'replace') then
  local reply = { 'HELD', string.format('%.0f', now), record, held, holder, id, 0, packed }
  local can_go = record == ARGV[7]
  if id == '' then
    reply[7] = redis.call('ZSCORE', KEYS[4], packed) and 1 or 0
  else
    reply[7] = #redis.call('XRANGE', KEYS[1], id, id)
    local rows = redis.pcall('XINFO', 'GROUPS', KEYS[1])
    for _, row in ipairs(rows.err and {} or rows) do
      local group = dict(row)
      reply[#reply + 1] = group.name
      can_go = can_go and marks[group.name] and order(id) > order(group['last-delivered-id'])
    end
    can_go = can_go and #reply > 8
  end
  if not can_go or reply[7] == 0 then return reply end
  if is_full then return { 'FULL' } end
  can_append(KEYS[1])
  for i = 11, first - 1 do can_write('HSET', marks[ARGV[i]]) end
  for i = 11, first - 1 do redis.call('HSET', marks[ARGV[i]], id, 'cancelled') end
  if id == '' then
    local left = math.max(0, redis.call('ZSCORE', KEYS[4], packed) - now)
    redis.call('ZREM', KEYS[4], packed)
    redis.call('SET', KEYS[5], 'cancelled', 'PX', string.format('%.0f', left + ARGV[3]))
  end
end
if is_full then return { 'FULL' } end
can_append(KEYS[1])
local fields, at, packed, life = { 'unique', ARGV[5], unpack(ARGV, first) }, '', '', ARGV[3]
if due then -- a delayed message has its name as its first field: see release_delayed
  for i, value in ipairs(fields) do fields[i] = struct.pack('>I4', #value) .. value end
  packed, life = table.concat(fields), string.format('%.0f', math.max(0, due - now) + life)
  redis.call('ZADD', KEYS[4], delay_score(KEYS[4], due), packed)
elseif max > 0 and ARGV[2] == 'trim' then
  at = redis.call('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(fields))
else
  at = redis.call('XADD', KEYS[1], '*', unpack(fields))
end
local answer = due and string.format('%.0f', due) or at
redis.call('SET', KEYS[2], answer, 'PX', life)
local till = tonumber(ARGV[6]) and string.format('%.0f', now + ARGV[6]) or ARGV[6]
redis.call('HSET', KEYS[3], ARGV[5], cmsgpack.pack({ till, ARGV[9], at, packed }))
return { 'OK', answer, record and not held and record or nil }
