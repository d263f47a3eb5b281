-- the fields of a session that storing letters of a source needs; the last four only for letters of MQTT subscriptions.
-- Then its last seq as a number; the position, of `width` bytes, up to which the source was stored; and before which
-- stamp letters come too late. What another client has written there is as missing. Uses `whole`
local function inbox_state(session, source, is_mqtt, width, now, latest)
  local call, state, since = redis.call, nil, ''
  if is_mqtt then
    state = call('HMGET', session, 'seq', 'until_ms', 'idle', 'since_ms', source, 'mqtt', 'gateway', 'epoch', 'pushed')
  else
    state = call('HMGET', session, 'seq', 'until_ms', 'idle', 'since_ms', source)
  end
  local seq, mark = tonumber(state[1] or ''), state[5] or ''
  if seq and not (seq >= 0 and seq < 9007199254740992) then seq = nil end
  if mark:byte(width + 1) ~= 64 then mark = '' end -- '@'
  if state[4] and (whole(state[4]) or latest) <= now + 1 then since = struct.pack('>BI6', 1, state[4]) end
  return state, seq, mark, since
end
