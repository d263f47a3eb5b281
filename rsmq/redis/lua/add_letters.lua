-- PURPOSE  Store letters in inboxes (on a cluster: in one) and remove old ones where an inbox is full.
-- KEYS     per device: messages zset, session hash, expiry zset, wake channel
-- ARGV     1 inbox_ttl_ms:int  2 limit:int  3 mark_ttl_ms:int
--          then per device: field of the source's mark, n:int, then n times: position, published_ms:int ('' = now),
--          ttl_ms:int ('' = none of its own), envelope
-- RETURNS  {'OK', then per device: stored:int, dropped:int, expired:int, late:int}
-- WHY      Positions of a source grow. A letter that is not above the mark was stored before, so a batch may be sent
--          again. The seq of a letter is assigned here, so the key of its envelope is derived from the key of its
--          inbox. Two stored letters never share a packet id: a seq whose id is in use is skipped, and if there are not
--          enough ids, the oldest letters make room first. A letter in the middle of its handshake is never dropped. A
--          session hash that is new, or was lost, is known to no session: its first letter rings, too.
--          Letters of a source with '&' are for a subscription, and so for an MQTT session. A router may have read the
--          subscription just before the session ended: such a letter is late, or its inbox would be left behind.
--          One call for several devices saves the server most of the overhead of a call.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local life, limit, mark_ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
-- the same for most letters of a call
local latest = now + life
local latest_text, plain = string.format('%.0f', latest), struct.pack('>BI6I6', 1, now, latest)

-- letters in the middle of a handshake, and their number
local function read_held(list)
  local held, size = {}, 0
  for each in (list or ''):gmatch('%d+') do
    held[each], size = true, size + 1
  end
  return held, size
end

-- packet ids that the next n letters cannot have: of stored letters that are a round older, or become so by skipping
local function read_taken(inbox, seq, n)
  local taken, from, to = {}, '-inf', seq + n - 65535
  while to > 0 do
    local old = redis.call('ZRANGEBYSCORE', inbox, from, to)
    if #old == 0 then break end
    for _, ref in ipairs(old) do
      taken[ref % 65535] = true
    end
    from, to = string.format('(%.0f', to), to + #old
  end
  return taken
end

-- drops expired letters first, then the oldest, until `most` are left; never those in a handshake
local function make_room(inbox, expiry, count, most, held, nheld)
  local expired, dropped = 0, 0
  local gone = redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, 1000)
  if #gone > 0 then
    redis.call('ZREM', expiry, unpack(gone))
    expired = redis.call('ZREM', inbox, unpack(gone))
  end
  local over = math.min(count - expired - most, 1000)
  if over <= 0 then return expired, dropped end
  local old, names, out = redis.call('ZRANGE', inbox, 0, over + nheld - 1), {}, {}
  for _, ref in ipairs(old) do
    if not held[ref] and #out < over then
      out[#out + 1] = ref
      names[#out] = inbox .. '_' .. ref
    end
  end
  if #out > 0 then
    dropped = redis.call('DEL', unpack(names))
    redis.call('ZREM', inbox, unpack(out))
    redis.call('ZREM', expiry, unpack(out))
  end
  return expired + #out - dropped, dropped
end

local function forget_old_marks(session)
  local fields = redis.call('HGETALL', session)
  for i = 1, #fields, 2 do
    local at = fields[i]:sub(1, 7) == 'source:' and tonumber(fields[i + 1]:match('@(%d+)$'))
    if at and at * 1000 < now - mark_ttl then redis.call('HDEL', session, fields[i]) end
  end
end

local function add(key, from, source, n)
  local inbox, session = KEYS[key], KEYS[key + 1]
  if source:sub(8, 8) == '&' and not redis.call('HGET', session, 'mqtt') then return 0, 0, 0, n end
  local state = redis.call('HMGET', session, 'seq', 'until_ms', 'since_ms', 'held', 'idle', source)
  local seq, till, since = tonumber(state[1] or 0), tonumber(state[2] or 0), tonumber(state[3] or 0)
  local mark = state[6] or '' -- 'position@seconds': above its own position, below the next one
  local held, nheld = read_held(state[4])
  local count = redis.call('ZCARD', inbox)
  if not state[1] and count > 0 then -- the session was lost, its letters were not
    local last = redis.call('ZREVRANGE', inbox, 0, 0)[1]
    seq = tonumber(last)
    redis.call('HSET', session, 'sent', last)
  end

  local newest, refs, own, dropped, expired, late, taken = mark, {}, nil, 0, 0, 0, nil
  for i = from, from + 4 * n - 1, 4 do
    if ARGV[i] > newest then
      newest = ARGV[i]
      local published, ttl, at = now, ARGV[i + 2], latest
      if ARGV[i + 1] ~= '' then published = tonumber(ARGV[i + 1]) end
      ttl = ttl ~= '' and published + ttl < at and published + ttl
      if ttl then at = ttl end
      if published < since then
        late = late + 1
      elseif at <= now then
        expired = expired + 1
      else
        if not taken and seq + n > 65535 then
          if count + n > 65535 then
            local more
            more, dropped = make_room(inbox, KEYS[key + 2], count, 65535 - n, held, nheld)
            expired, count = expired + more, count - more - dropped
          end
          taken = read_taken(inbox, seq, n)
        end
        repeat
          seq = seq + 1
        until not taken or not taken[seq % 65535]
        local ref = string.format('%.0f', seq)
        local stamp = at == latest and published == now and plain or struct.pack('>BI6I6', 1, published, at)
        redis.call('SET', inbox .. '_' .. ref, stamp .. ARGV[i + 3], 'PXAT', at == latest and latest_text or at)
        refs[#refs + 1] = ref
        refs[#refs + 1] = ref
        if ttl then
          own = own or {}
          own[#own + 1] = at
          own[#own + 1] = ref
        end
      end
    end
  end
  if newest == mark then return 0, 0, 0, 0 end

  local is_renewed = till < latest
  if is_renewed then till = latest + math.floor(life / 64) end
  if #refs > 0 then
    redis.call('ZADD', inbox, unpack(refs))
    if own then redis.call('ZADD', KEYS[key + 2], unpack(own)) end
    count = count + #refs / 2
    if count > limit then
      local more, gone = make_room(inbox, KEYS[key + 2], count, limit, held, nheld)
      expired, dropped = expired + more, dropped + gone
    end
    if is_renewed or count * 2 <= #refs then redis.call('PEXPIREAT', inbox, till) end
    if own then redis.call('PEXPIREAT', KEYS[key + 2], till) end
  end

  local last = string.format('%.0f', seq)
  mark = newest .. '@' .. time[1]
  if is_renewed then
    redis.call('HSET', session, 'seq', last, source, mark, 'until_ms', string.format('%.0f', till))
    redis.call('PEXPIREAT', session, till)
  else
    redis.call('HSET', session, 'seq', last, source, mark)
  end
  if dropped > 0 then redis.call('HINCRBY', session, 'dropped', dropped) end
  if expired > 0 then redis.call('HINCRBY', session, 'expired', expired) end
  if late > 0 then redis.call('HINCRBY', session, 'late', late) end
  if state[1] and not state[6] and redis.call('HLEN', session) > 48 then forget_old_marks(session) end
  if (state[5] == '1' or not state[1]) and #refs > 0 then
    if state[5] == '1' then redis.call('HSET', session, 'idle', '0') end
    redis.call('SPUBLISH', KEYS[key + 3], '')
  end
  return #refs / 2, dropped, expired, late
end

local reply, from = { 'OK' }, 4
for key = 1, #KEYS, 4 do
  local n = tonumber(ARGV[from + 1])
  local at = #reply
  reply[at + 1], reply[at + 2], reply[at + 3], reply[at + 4] = add(key, from + 2, ARGV[from], n)
  from = from + 2 + 4 * n
end
return reply
