-- PURPOSE  Move delayed messages of a sealed partition to one that follows it.
-- KEYS     1 delayed zset of the sealed one  2 of the one that follows  3 unique hash of the sealed one  4 of the other
-- ARGV     packed entries
-- RETURNS  moved:int
-- WHY      What is due cannot go into a sealed stream. ZREM and ZADD run in one script, so a message is cancelled or given
--          another due time in the one or in the other. Its due time is that of now: it may have changed since it was
--          read. A message that holds a unique name has it as its first field: the record of the name goes with it.
-- USES     is_id, name_record, may_write, can_write
can_write('ZREM', KEYS[1], 'ZADD', KEYS[2], 'HDEL', KEYS[3], 'HSET', KEYS[4])
local function name_in(packed)
  local is_name, first, name = pcall(struct.unpack, '>I4c0I4c0', packed)
  return is_name and first == 'unique' and name
end
local moved = 0
for _, packed in ipairs(ARGV) do
  local score = redis.call('ZSCORE', KEYS[1], packed)
  if score then
    redis.call('ZREM', KEYS[1], packed)
    redis.call('ZADD', KEYS[2], score, packed)
    local name = name_in(packed)
    local record = name and redis.call('HGET', KEYS[3], name)
    local till, _, _, own = name_record(record or '')
    if till and own == packed then
      redis.call('HDEL', KEYS[3], name)
      redis.call('HSET', KEYS[4], name, record)
    end
    moved = moved + 1
  end
end
return moved
