#!lua
-- PURPOSE  Append outputs that wait in an out-stream of another slot, except those that were appended before.
-- KEYS     1 stream  2 jobs hash  3 delayed zset  then the dedup strings
-- ARGV     1 mark: field of the hash  2 max_length:int  3 on_full:reject|trim
--          then per output: position (text of fixed width, rising), dedup:int (an index in KEYS, or 0), window_ms:int,
--          due_ms or '', n:int, n values (field, value, ... or a packed entry)
-- RETURNS  {'OK'|'FULL', done:int}, at last 'FOREIGN' if another client has written into the mark: what comes again is
--          stored again; an output without room and those after it are not done
-- WHY      The last position is stored together with the outputs, as in publish_marked: so the owner of the partition
--          and the one after it, both at once or after lost replies, append each output once and in order.
-- USES     dict, mark_of, may_write, can_write, can_append, delay_score
local mark, is_foreign = mark_of(redis.call('HGET', KEYS[2], ARGV[1]), ARGV[4])
local max, room, word, done, at, trouble = tonumber(ARGV[2]), math.huge, 'OK', 0, 4, nil
if max > 0 and ARGV[3] == 'reject' then room = max - redis.call('XLEN', KEYS[1]) end
can_write('XADD', KEYS[1], 'HSET', KEYS[2], 'ZADD', KEYS[3])
can_append(KEYS[1])
for i = 4, #KEYS do can_write('SET', KEYS[i]) end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
while at <= #ARGV do
  local dedup, due, n = KEYS[tonumber(ARGV[at + 1])], ARGV[at + 3], tonumber(ARGV[at + 4])
  local first, last, id = at + 5, at + 4 + n, nil
  if ARGV[at] > mark and not (dedup and redis.call('EXISTS', dedup) == 1) then
    if due ~= '' then
      id = redis.pcall('ZADD', KEYS[3], delay_score(KEYS[3], tonumber(due)), ARGV[first])
    elseif room < 1 then
      word = 'FULL'
      break
    elseif max > 0 and ARGV[3] == 'trim' then
      id = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(ARGV, first, last))
    else
      id = redis.pcall('XADD', KEYS[1], '*', unpack(ARGV, first, last))
    end
    if type(id) == 'table' and id.err then
      trouble = id
      break
    end
    if due == '' then room = room - 1 end
    if dedup then
      local left = due ~= '' and math.max(0, due - now) or 0
      redis.call('SET', dedup, due ~= '' and due or id, 'PX', string.format('%.0f', left + ARGV[at + 2]))
    end
  end
  if ARGV[at] > mark then mark = ARGV[at] end
  done, at = done + 1, last + 1
end
if done > 0 then redis.call('HSET', KEYS[2], ARGV[1], mark) end
return trouble or { word, done, is_foreign and 'FOREIGN' or nil }
