-- messages whose ids their owner has kept, by KEYS 1 to 6 and ARGV 3 to 19 of read_again. First all that could fail is
-- read. Returns a function, the last id that the group was given, and whether messages are parked. The function returns
-- of an id its row and entry; or nil, nil and a word: 'CANCELLED', 'LOST' and 'TRIMMED' are settled, 'UNDELIVERED' is
-- not known as delivered. Uses `order`, `last_delivered`, `bury_lost`, `is_batch_cancelled`, `end_cancelled`
local function kept_messages()
  local has_parked, given = redis.call('ZCARD', KEYS[3]) > 0, last_delivered(KEYS[1], ARGV[3]) or '0-0'
  local may_be_cancelled = redis.call('HLEN', KEYS[5]) + redis.call('ZCARD', KEYS[6]) > 0
  redis.call('XPENDING', KEYS[1], ARGV[3])
  local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  local newest, first = order(given), oldest and order(oldest[1])
  local function look(id)
    local row = redis.call('XPENDING', KEYS[1], ARGV[3], id, id, 1)[1]
    if not row and order(id) > newest then return nil, nil, 'UNDELIVERED' end
    local entry, word = redis.call('XRANGE', KEYS[1], id, id)[1], nil
    local is_marked = may_be_cancelled and (redis.call('HGET', KEYS[5], id) or redis.call('ZSCORE', KEYS[6], id))
    if is_marked or may_be_cancelled and is_batch_cancelled(KEYS[5], entry) then
      word = 'CANCELLED'
    elseif not entry then
      word = ARGV[6] == '1' and (not first or order(id) < first) and 'TRIMMED' or 'LOST'
    end
    if not word then return row, entry end
    if word == 'LOST' and row then bury_lost(KEYS[4], ARGV[7], id, unpack(ARGV, 8, 19)) end
    redis.call('XACK', KEYS[1], ARGV[3], id)
    if row and has_parked then redis.call('ZREM', KEYS[3], id .. '|' .. row[4]) end
    if word == 'CANCELLED' then end_cancelled(KEYS[1], ARGV[3], id, entry, KEYS[5], KEYS[6]) end
    return nil, nil, word
  end
  return look, given, has_parked
end
