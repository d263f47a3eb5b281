#!lua
-- PURPOSE  Acknowledge handled messages of one partition and store the outputs of their handlers: both or neither.
-- KEYS     1 stream  2 lease hash  3 retry zset  then the keys of the outputs, each once: streams, delayed zsets, dedups
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 again:0|1 (1: an earlier call may have been executed)
--          5 streams:int  6 zsets:int  7 has_rules:0|1|2|3 (2: swap, 3: anywhere)  then per message: stream id, outputs:int
--          (a member of a batch: 'outputs|field batch|outcome|block.number ...', what its handler has added), and per output:
--          target:int (an index in KEYS), rule, n:int, n values (field, value, ... or a packed entry). A rule is '' (no limit) or
--          'max_length:int reject|trim dedup:int (an index, or 0) window_ms:int due (ms since 1970, '+ms' from now, or '')'
-- RETURNS  {'OK', messages done with:int, acknowledged:int, index of a full target or 0} or {'STALE_EPOCH'}
-- WHY      Outputs are stored only where XACK returned 1, so a call that is sent again after a lost reply stores nothing
--          twice. What could fail is checked before anything is written: types, rights, seals, room per message. Without
--          allow-oom a server without memory refuses the whole call. A message without room holds back those after it:
--          their order counts. Under a lease only the owner settles: on a first call, a message that is not pending lost
--          its consumer (see start_message), unless the group was created again and will receive it once more.
--          Swap: a message makes room for one output into its own topic, which else would wait for itself for ever, or
--          into any up to twice its limit, where full topics wait for each other in a circle.
-- USES     dict, acknowledge, can_write, can_append, delay_score, batch_keys, fire_batch, count_batch, leave_batch
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local time, lengths, streams, zsets = redis.call('TIME'), {}, 3 + ARGV[5], 3 + ARGV[5] + ARGV[6]
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local retry = redis.call('EXISTS', KEYS[3]) == 1 and KEYS[3]
can_write('XACK', KEYS[1], 'ZREM', KEYS[3])
for index = 4, #KEYS do
  local write = index <= streams and 'XADD' or index <= zsets and 'ZADD' or 'SET'
  can_write(write, KEYS[index])
  if write ~= 'SET' then can_append((KEYS[index]:gsub(':delayed$', ''))) end
  lengths[index] = redis.call(({ XADD = 'XLEN', ZADD = 'ZCARD', SET = 'EXISTS' })[write], KEYS[index])
end

local function topic_of(stream) return stream:match('^(.*)%.') end
-- walk over the outputs of a message: measure them (returns the end, and a target without room), or store them
local function walk(at, count, is_storing)
  local full, has_rules, can_swap, is_any = 0, ARGV[7] ~= '0', ARGV[7] >= '2', ARGV[7] == '3'
  for _ = 1, count do
    local target, last, id = tonumber(ARGV[at]), at + 2 + ARGV[at + 2], nil
    local max, on_full, dedup, window, due
    if has_rules then max, on_full, dedup, window, due = ARGV[at + 1]:match('^(%d+) (%a+) (%d+) (%d+) (.*)$') end
    dedup, max = tonumber(dedup or 0), tonumber(max or 0)
    if lengths[dedup] == 1 then
      -- stored before, under the same id
    elseif not is_storing then
      lengths[target] = lengths[target] + 1
      if max > 0 and on_full == 'reject' and due == '' and lengths[target] > max then
        local fits = is_any and lengths[target] <= 2 * max or topic_of(KEYS[target]) == topic_of(KEYS[1])
        full, can_swap = can_swap and fits and full or target, false
      end
    elseif due and due ~= '' then
      id = tonumber(due) + (due:sub(1, 1) == '+' and now or 0)
      redis.call('ZADD', KEYS[target], delay_score(KEYS[target], id), ARGV[last])
    elseif max > 0 and on_full == 'trim' then
      id = redis.call('XADD', KEYS[target], 'MAXLEN', '~', max, '*', unpack(ARGV, at + 3, last))
    else
      id = redis.call('XADD', KEYS[target], '*', unpack(ARGV, at + 3, last))
    end
    if id and dedup > 0 then
      local left = due ~= '' and math.max(0, id - now) or 0
      id = due ~= '' and string.format('%.0f', id) or id
      redis.call('SET', KEYS[dedup], id, 'PX', string.format('%.0f', left + window))
      lengths[dedup] = 1
    end
    at = last + 1
  end
  return at, full
end

local at, done, acknowledged, full, leaving = 8, 0, 0, 0, {}
while at <= #ARGV do
  local next, count, member, outcome, added = nil, ARGV[at + 1]:match('^(%d+)|?([^|]*)|?([^|]*)|?(.*)$')
  if ARGV[7] ~= '0' then next, full = walk(at + 2, count, false) end
  if full > 0 then break end
  if acknowledge(KEYS[1], ARGV[3], ARGV[at], ARGV[2] == '' and ARGV[1], ARGV[4] == '0', retry) then
    acknowledged, next = acknowledged + 1, walk(at + 2, count, true)
    if member ~= '' then leaving[#leaving + 1] = { member, outcome, added } end
  end
  at, done = next or walk(at + 2, count, false), done + 1
end
return leave_batch(KEYS[1], ARGV[3], leaving) or { 'OK', done, acknowledged, full }
