#!lua
-- PURPOSE  Acknowledge handled messages of one partition and store the outputs of their handlers: both or neither.
-- KEYS     1 stream  2 lease hash  3 retry zset  then the keys of the outputs, each once: streams, delayed zsets, strings
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4 again:0|1 (1: an earlier call may have been executed)
--          5 streams:int  6 zsets:int  7 has_rules:0|1|2|3 (2: swap, 3: anywhere)  then per message: stream id, outputs:int
--          (then `n`: its handler has kept notes, or `l`: the first output is its dead letter; then of a member of a batch
--          '|field batch|outcome|block.number ...', what its handler has added), and per output: target:int (an index in
--          KEYS), rule, n:int, n values (field, value, ...; a packed entry; or a result and its ms). A rule is '' (no limit) or
--          'max_length:int reject|trim dedup:int (an index, or 0) window_ms:int due (ms since 1970, '+ms' from now, or '')'
-- RETURNS  {'OK', messages done with:int, acknowledged:int, index of a full target or 0} or {'STALE_EPOCH'}
-- WHY      Outputs are stored only where XACK returned 1, so a call that is sent again after a lost reply stores nothing
--          twice. What could fail is checked before anything is written: types, rights, seals, room per message. Without
--          allow-oom a server without memory refuses the whole call. A message without room holds back those after it:
--          their order counts. Under a lease only the owner settles: on a first call, a message that is not pending lost
--          its consumer (see start_message), unless the group was created again and will receive it once more.
--          Swap: a message makes room for one output into its own topic, which else would wait for itself for ever, or
--          into any up to twice its limit, where full topics wait for each other in a circle. A dead letter takes steps along.
-- USES     dict, acknowledge, may_write, can_write, can_append, measure_targets, take_notes, delay_score, batch_keys, fire_batch, count_batch, leave_batch
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local time, zsets = redis.call('TIME'), 3 + ARGV[5] + ARGV[6]
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local retry = redis.call('EXISTS', KEYS[3]) == 1 and KEYS[3]
can_write('XACK', KEYS[1], 'ZREM', KEYS[3])
local lengths = measure_targets(3 + ARGV[5], zsets)

-- walk over the outputs of a message: measure them (returns the end, and a full target), or store them, the first with `steps`
local function walk(at, count, is_storing, steps)
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
        local fits = is_any and lengths[target] <= 2 * max or KEYS[target]:match('^(.*)%.') == KEYS[1]:match('^(.*)%.')
        full, can_swap = can_swap and fits and full or target, false
      end
    elseif due and due ~= '' then
      id = tonumber(due) + (due:sub(1, 1) == '+' and now or 0)
      redis.call('ZADD', KEYS[target], delay_score(KEYS[target], id), ARGV[last])
    elseif target > zsets then
      redis.call('SET', KEYS[target], ARGV[at + 3], 'PX', ARGV[last])
      redis.pcall('SPUBLISH', KEYS[target], '')
    elseif max > 0 and on_full == 'trim' then
      local fields = { unpack(ARGV, at + 3, last) }
      fields[#fields + 1], fields[#fields + 2] = unpack(steps or {})
      id = redis.call('XADD', KEYS[target], 'MAXLEN', '~', max, '*', unpack(fields))
    else
      id = redis.call('XADD', KEYS[target], '*', unpack(ARGV, at + 3, last))
    end
    if id and dedup > 0 then
      local left = due ~= '' and math.max(0, id - now) or 0
      id = due ~= '' and string.format('%.0f', id) or id
      redis.call('SET', KEYS[dedup], id, 'PX', string.format('%.0f', left + window))
      lengths[dedup] = 1
    end
    at, steps = last + 1, nil
  end
  return at, full
end
local at, done, acknowledged, full, leaving = 8, 0, 0, 0, {}
while at <= #ARGV do
  local next, count, mark, member, outcome, added = nil, ARGV[at + 1]:match('^(%d+)(%a?)|?([^|]*)|?([^|]*)|?(.*)$')
  if ARGV[7] ~= '0' then next, full = walk(at + 2, count, false) end
  if full > 0 then break end
  if acknowledge(KEYS[1], ARGV[3], ARGV[at], ARGV[2] == '' and ARGV[1], ARGV[4] == '0', retry) then
    local steps = mark ~= '' and take_notes(KEYS[1], ARGV[3], ARGV[at])
    acknowledged, next = acknowledged + 1, walk(at + 2, count, true, mark == 'l' and steps)
    if member ~= '' then leaving[#leaving + 1] = { member, outcome, added } end
  end
  at, done = next or walk(at + 2, count, false), done + 1
end
return leave_batch(KEYS[1], ARGV[3], leaving) or { 'OK', done, acknowledged, full }
