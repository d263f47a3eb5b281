#!lua flags=allow-oom
-- PURPOSE  Connect a device under a new epoch, which shuts out its previous connection.
-- KEYS     1 messages zset  2 session hash  3 expiry zset  4 wake channel
-- ARGV     1 gateway  2 clean:0|1  3 inbox_ttl_ms:int  4 field of the gateway's mark  5 position (16 digits)
--          6 mark_ttl_ms:int  7 1 = as an MQTT client
-- RETURNS  {'OK', epoch, present:0|1|2, sent, floor, leftover:int, epoch before (with 7)} or {'STALE_EPOCH'}
--          present 2: the session had expired; 0 with 7: there is no MQTT session
-- WHY      A connect whose answer was lost is repeated, perhaps after the device has connected elsewhere. Each connect
--          of a gateway process has a higher position, and the mark keeps the last one that was executed. The same
--          position is a repeat: it gets the first answer, or STALE_EPOCH if a newer connect has taken the session. A
--          lower position is an older connect, so it is refused. A clean start raises the floor to the newest seq:
--          letters up to it are invisible at once and are removed in chunks later (`leftover`). since_ms refuses
--          letters that were published before the clean start but arrive after it. The epoch also grows when the
--          session had expired, so that a connection of an earlier session stays shut out. If only the session was
--          lost, seq and sent continue at its letters. The session of an MQTT client that has expired has ended, also
--          if nothing has removed it yet: then this start is clean. From a clean start until its
--          session begins, an MQTT client has none, so that a letter meanwhile is refused: no gateway would pass it on.
--          If its gateway dies in between, the next connect finds none, and what is left of the old one.
--          A letter that went along with a ring may have been sent, so it counts as that.
--          What is no number in the hash is of another client, and is as missing.
-- USES     whole, whole_or, forget_marks, may_write, seq_of_push
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local text = string.format('%.0f', now)
local state = redis.call('HMGET', KEYS[2], 'epoch', 'seq', 'sent', 'floor', ARGV[4], 'mqtt', 'gateway', 'seen_ms',
  'pushed')
local seq, mark = whole(state[2]) and state[2], state[5] and state[5]:match('^%d+:%d+:%d@%d+$') or ''
local sent, floor, before = whole_or(state[3], '0'), whole_or(state[4], '0'), whole(state[1])

-- the mark: position:epoch:present@seconds
if mark:sub(1, #ARGV[5]) >= ARGV[5] then
  local epoch, present = mark:match(':(%d+):(%d)@')
  if mark:sub(1, #ARGV[5]) > ARGV[5] or epoch ~= state[1] then return { 'STALE_EPOCH' } end
  return { 'OK', epoch, tonumber(present), sent, floor, redis.call('ZCOUNT', KEYS[1], '-inf', floor) }
end

may_write('HSET HDEL', KEYS[2], 'PEXPIREAT', KEYS[1], 'SPUBLISH', KEYS[4])
local changes = {}
if (state[9] or '') ~= '' then -- it may have been sent to the client
  sent = string.format('%.0f', math.max(tonumber(sent), seq_of_push(state[9])))
  changes = { 'sent', sent, 'pushed', '' }
end
if not seq then
  seq = whole_or(redis.call('ZREVRANGE', KEYS[1], 0, 0)[1], '0')
  sent, changes = seq, { 'sent', seq, 'pushed', '' }
end
local epoch = string.format('%.0f', math.max((before or 0) + 1, now))
local present = (state[1] or state[2] or seq ~= '0') and 1 or 0
if ARGV[7] == '1' and not state[6] then
  present = 0
elseif ARGV[7] == '1' and ARGV[2] == '0' then
  local ends = (whole(state[8]) or 0) + (whole(state[6]) or 0) * 1000
  if state[6] == '0' or not state[7] and ends <= now then present = 2 end
end
if ARGV[2] == '1' or present == 2 then
  floor = seq
  for _, each in ipairs({ 'floor', floor, 'since_ms', text, 'held', '' }) do
    changes[#changes + 1] = each
  end
  if ARGV[7] == '1' then redis.call('HDEL', KEYS[2], 'mqtt') end
end
local leftover = redis.call('ZCOUNT', KEYS[1], '-inf', floor)
if not state[5] then forget_marks(KEYS[2], now - ARGV[6]) end
local till = now + ARGV[3] + math.floor(ARGV[3] / 64)
redis.call('HSET', KEYS[2], 'epoch', epoch, 'seq', seq, 'gateway', ARGV[1], 'connected_ms', text, 'seen_ms', text,
  'idle', '0', 'until_ms', string.format('%.0f', till),
  ARGV[4], ARGV[5] .. ':' .. epoch .. ':' .. present .. '@' .. time[1], unpack(changes))
for i = 1, 3 do
  redis.call('PEXPIREAT', KEYS[i], till)
end
redis.call('SPUBLISH', KEYS[4], '')
return { 'OK', epoch, present, sent, floor, leftover, ARGV[7] and before and state[1] }
