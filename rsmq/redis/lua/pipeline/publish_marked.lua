-- PURPOSE  Append a batch of messages from one source, except those that this job has appended before.
-- KEYS     1 stream  2 jobs hash  3.. those of the partitions that this one follows in a resize
-- ARGV     1 max_length:int  2 on_full:reject|trim  3 mark: field of the hash
--          then per message: position (text of fixed width, rising), n:int, n values (field, value, ...)
-- RETURNS  {'OK'|'FULL', appended:int, skipped:int}, at last 'FOREIGN' if another client has written into the mark: what
--          comes again is stored again; a message without room and those after it count as neither
-- WHY      The script stores the last position together with the messages. So a task that runs again, or twice at the
--          same time, appends each message once, even after lost replies. Positions of fixed width compare as text.
--          What it has appended before a resize is in the partitions before: their marks count, too.
-- USES     mark_of, may_write, can_write
local max, trim = tonumber(ARGV[1]), ARGV[2] == 'trim'
can_write('XADD', KEYS[1], 'HSET', KEYS[2])
local mark, is_foreign = mark_of(redis.call('HGET', KEYS[2], ARGV[3]), ARGV[4])
for at = 3, #KEYS do
  local before = mark_of(redis.call('HGET', KEYS[at], ARGV[3]), ARGV[4])
  if before > mark then mark = before end
end
local room = math.huge
if max > 0 and not trim then room = max - redis.call('XLEN', KEYS[1]) end
local word, appended, skipped, at, trouble = 'OK', 0, 0, 4, nil
while at <= #ARGV do
  local n = tonumber(ARGV[at + 1])
  if ARGV[at] <= mark then
    skipped = skipped + 1
  elseif appended >= room then
    word = 'FULL'
    break
  else
    local id
    if max > 0 and trim then
      id = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', max, '*', unpack(ARGV, at + 2, at + n + 1))
    else
      id = redis.pcall('XADD', KEYS[1], '*', unpack(ARGV, at + 2, at + n + 1))
    end
    if id.err then
      trouble = id
      break
    end
    appended, mark = appended + 1, ARGV[at]
  end
  at = at + n + 2
end
if appended > 0 then redis.call('HSET', KEYS[2], ARGV[3], mark) end
return trouble or { word, appended, skipped, is_foreign and 'FOREIGN' or nil }
