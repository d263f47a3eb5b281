-- PURPOSE  Store letters in inboxes (on a cluster: in one) and remove old ones where an inbox is full.
-- KEYS     per device: messages zset, session hash, expiry zset
-- ARGV     1 inbox_ttl_ms:int  2 limit:int  3 mark_ttl_ms:int  4 one array of MessagePack, per device: field of the
--          source's mark, n:int, then n times: position, start of its stamp ('' = now), ttl_ms, envelope  5 wait:0|1
-- RETURNS  {'OK', stored:int, dropped:int, expired:int, late:int}, of all devices together, then for each MQTT session
--          whose inbox is full: number:dropped:letters before the first that has no room (or -1):oldest seq
-- WHY      A letter that is not above the mark of its source was stored before: a batch may be sent again. Seqs are
--          assigned here, so the keys of letters follow from that of the inbox. A session hash that is new, or was
--          lost, is known to no session: its first letter rings. A source with '&' is for an MQTT session. With `wait`,
--          what a connected client has no room for is not stored. A since_ms ahead of a set-back clock is void.
-- USES     taken_ids, make_room, fit_letters, last_seq, forget_marks, note_letters
local call, time, life, limit = redis.call, redis.call('TIME'), tonumber(ARGV[1]), tonumber(ARGV[2])
local now, letters = time[1] * 1000 + math.floor(time[2] / 1000), cmsgpack.unpack(ARGV[4])
local latest, just, tail = now + life, struct.pack('>BI6', 1, now), struct.pack('>I6', now + life)
local at_latest, renewed = string.format('%.0f', latest), string.format('%.0f', latest + math.floor(life / 64))
local total, full, refs, moment = { stored = 0, dropped = 0, expired = 0, late = 0 }, {}, {}, '@' .. time[1]
local function count(session, field, n)
  if n > 0 then call('HINCRBY', session, field, n) end
  total[field] = total[field] + n
end

local function add(inbox, session, expiry, source, from, to, number)
  local is_mqtt = source:byte(8) == 38
  local state = is_mqtt and call('HMGET', session, 'seq', 'until_ms', 'idle', 'since_ms', source, 'mqtt', 'gateway')
    or call('HMGET', session, 'seq', 'until_ms', 'idle', 'since_ms', source)
  local mark, since = state[5] or '', tonumber(state[4] or latest) <= now + 1 and struct.pack('>BI6', 1, state[4]) or ''
  if is_mqtt and not state[6] then
    total.late = total.late + letters[from - 1]
    return
  elseif is_mqtt and state[7] and ARGV[5] == '1' then
    to = fit_letters(letters, from, to, mark, inbox, session, expiry, limit, now, full, number)
  end
  local size = call('ZCARD', inbox)
  local last, newest, top = last_seq(inbox, session, state[1], size), mark, 0
  local seq, taken = tonumber(last or 0), taken_ids(inbox, (last or 0) + size + (to - from + 1) / 4)
  for i = from, to, 4 do
    if letters[i] > newest then
      newest = letters[i]
      local head, ends, till, rest = letters[i + 1] == '' and just or letters[i + 1], latest, at_latest, tail
      if letters[i + 2] ~= '' then
        ends = math.min(struct.unpack('>I6', head, 2) + letters[i + 2], latest)
        till, rest = string.format('%.0f', ends), struct.pack('>I6', math.max(ends, 0))
      end
      if head < since then
        count(session, 'late', 1)
      elseif ends <= now then
        count(session, 'expired', 1)
      else
        repeat seq = seq + 1 until not taken or not taken[seq % 65535]
        last = string.format('%d', seq)
        call('SET', inbox .. '_' .. last, head .. rest .. letters[i + 3], 'PXAT', till)
        if ends < latest and call('ZADD', expiry, till, last) then call('PEXPIREAT', expiry, renewed) end
        refs[top + 1], refs[top + 2], top = last, last, top + 2
      end
    end
  end
  if newest == mark then return end
  if state[1] and mark == '' then forget_marks(session, now - ARGV[3]) end
  local is_renewed = tonumber(state[2] or 0) < latest
  local till = is_renewed and renewed or state[2]
  if top > 0 then call('ZADD', inbox, unpack(refs, 1, top)) end
  if top > 0 and (is_renewed or size == 0) then call('PEXPIREAT', inbox, till) end
  note_letters(session, last or '0', source, newest .. moment, till, is_renewed, top > 0 and state[3] == '1')
  total.stored = total.stored + top / 2
  if size + top / 2 > limit then
    local dropped, expired = make_room(inbox, session, expiry, size + top / 2 - limit, now)
    count(session, 'dropped', dropped)
    count(session, 'expired', expired)
    if is_mqtt and dropped > 0 then full[#full + 1] = number .. ':' .. dropped .. ':-1:' end
  end
  if top > 0 and (state[3] == '1' or not state[1]) then call('SPUBLISH', inbox:sub(1, -9) .. 'wake', '') end
end

local at = 1
for key = 1, #KEYS, 3 do
  local to = at + 1 + 4 * letters[at + 1]
  add(KEYS[key], KEYS[key + 1], KEYS[key + 2], letters[at], at + 2, to, (key + 2) / 3)
  at = to + 1
end
return { 'OK', total.stored, total.dropped, total.expired, total.late, unpack(full) }
