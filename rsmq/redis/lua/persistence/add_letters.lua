-- PURPOSE  Store letters in inboxes (on a cluster: in one) and remove old ones where an inbox is full.
-- KEYS     per device: messages zset, session hash, expiry zset
-- ARGV     1 inbox_ttl_ms:int  2 limit:int  3 mark_ttl_ms:int  4 an array of MessagePack, per device: field of its
--          source's mark, n:int, n times: position, stamp's start ('' = now), ttl_ms, envelope  5 wait:0|1  6 call's name
-- RETURNS  {'OK', stored:int, dropped:int, expired:int, late:int}, of all devices together, then of MQTT sessions, each
--          with the number of the device in this call, from 1:
--          'REFUSED:device:first:last' they are not for the session it has now; those behind them are not stored yet
--          'NO_ROOM:device:stored:taken' the letters behind so many wait for room; its client has taken so many so far
--          'DROPPED:device:count' so many older letters have made room
-- WHY      A letter that is not above the mark of its source was stored before: a batch may be sent again. Those that
--          are refused raise no mark, so that a call whose reply is lost refuses them again. Seqs are assigned here. A
--          session hash that is new, or was lost, is known to no session: its first letter rings. With `wait`, what has
--          no room at a connected client is not stored. A since_ms ahead of a set-back clock is void.
-- USES     whole, whole_or, count_up, count_in, taken_ids, make_room, refuse_letters, fit_letters, last_seq, forget_marks, note_letters, inbox_state, push_of, end_letter, first_letter, may_write
local call, time, life, limit = redis.call, redis.call('TIME'), tonumber(ARGV[1]), tonumber(ARGV[2])
local now, letters = time[1] * 1000 + math.floor(time[2] / 1000), cmsgpack.unpack(ARGV[4])
local latest, tail = now + life, struct.pack('>I6', now + life)
local at_latest, renewed = string.format('%.0f', latest), string.format('%.0f', latest + math.floor(life / 64))
local total, notes, refs, moment = { stored = 0, dropped = 0, expired = 0, late = 0 }, {}, {}, '@' .. time[1]
local plain, tonumber, format, was_new, at = struct.pack('>BI6', 1, now) .. tail, tonumber, string.format, false, 1
local function add(inbox, session, expiry, source, from, to, number)
  local is_mqtt = source:byte(8) == 38  -- '&'
  if was_new and to == from + 3 and not is_mqtt
    and first_letter(inbox, session, letters, from, source, plain, tail, moment, at_latest, renewed) then
    total.stored = total.stored + 1
    return
  end
  local state, known, mark, since = inbox_state(session, source, is_mqtt, #letters[from], now, latest)
  if is_mqtt then
    local has_session = state[6] and (state[6] ~= '0' or state[7]) -- one of no length ends with its connection
    -- most often the first letter is a new one of this session, and so are those behind it
    if (not has_session or letters[from + 1] < since or letters[from] <= mark)
      and refuse_letters(total, notes, letters, from, to, has_session, mark, since, session, number) then return end
    if state[7] and ARGV[5] == '1' then
      to = fit_letters(total, notes, letters, from, to, mark, inbox, session, expiry, limit, now, number)
    end
  end
  local size = call('ZCARD', inbox)
  was_new = size == 0 and not known
  local last, newest, top = known and state[1] or size > 0 and last_seq(inbox, session) or '0', mark, 0
  local seq, before, letter, ring, pushed = tonumber(last), last, nil, '', nil
  local taken = seq + size + to > 65535 and taken_ids(inbox, seq + size + (to - from + 1) / 4)
  for i = from, to, 4 do
    if letters[i] > newest then
      newest = letters[i]
      local stamp, ends, is_late, is_over = plain, at_latest
      if letters[i + 1] ~= '' then stamp, is_late = letters[i + 1] .. tail, letters[i + 1] < since end
      if letters[i + 2] ~= '' then stamp, ends, is_over = end_letter(stamp, letters[i + 2], now, latest) end
      if is_late or is_over then
        count_in(total, session, is_late and 'late' or 'expired', 1)
      else
        repeat seq = seq + 1 until not taken or not taken[seq % 65535]
        last, letter = format('%d', seq), stamp .. letters[i + 3]
        call('SET', inbox .. '_' .. last, letter, 'PXAT', ends)
        if ends ~= at_latest and call('ZADD', expiry, ends, last) then call('PEXPIREAT', expiry, renewed) end
        refs[top + 1], refs[top + 2], top = last, last, top + 2
      end
    end
  end
  if newest == mark then return end
  if known and mark == '' then forget_marks(session, now - ARGV[3]) end
  local is_renewed = (tonumber(state[2] or 0) or 0) < latest or #state[2] ~= #renewed
  local is_idle, till = top > 0 and state[3] == '1', is_renewed and renewed or state[2]
  if top > 0 then call('ZADD', inbox, unpack(refs, 1, top)) end
  if top > 0 and (is_renewed or size == 0) then call('PEXPIREAT', inbox, till) end
  if is_idle and is_mqtt and top == 2 and ARGV[6] then ring, pushed = push_of(state, before, last, ARGV[6], letter) end
  note_letters(session, last, source, newest .. moment, till, is_renewed, is_idle, pushed)
  total.stored, size = total.stored + top / 2, size + top / 2
  local dropped = size > limit and make_room(total, inbox, session, expiry, size - limit, now) or 0
  if is_mqtt and dropped > 0 then notes[#notes + 1] = format('DROPPED:%d:%d', number, dropped) end
  if is_idle or top > 0 and not known then call('SPUBLISH', inbox:sub(1, -9) .. 'wake', ring) end
end
may_write('SET DEL PEXPIREAT ZADD ZREM SPUBLISH', KEYS[1], 'HSET HINCRBY HDEL', KEYS[2])
for key = 1, #KEYS, 3 do
  add(KEYS[key], KEYS[key + 1], KEYS[key + 2], letters[at], at + 2, at + 1 + 4 * letters[at + 1], (key + 2) / 3)
  at = at + 2 + 4 * letters[at + 1]
end
return { 'OK', total.stored, total.dropped, total.expired, total.late, unpack(notes) }
