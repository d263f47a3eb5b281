-- removes letters of an inbox that its client has acknowledged, by their seqs; returns the reply of ack_letters. `named`:
-- the letter that its reader took from a ring, as `pushed` has it. Uses `whole`, `may_write`, `seq_of_push`, `taken_push`
local function remove_acked(inbox, session, expiry, epoch, seqs, named)
  local state = named and redis.call('HMGET', session, 'epoch', 'held', 'sent', 'floor', 'pushed')
    or redis.call('HMGET', session, 'epoch', 'held', 'sent', 'floor')
  if state[1] ~= epoch then return { state[1] and 'STALE_EPOCH' or 'NO_SESSION' } end
  local taken = taken_push(state[5] or '', named)
  local names, sent = {}, math.max(whole(state[3]) or 0, whole(state[4]) or 0, taken)
  for i, seq in ipairs(seqs) do
    if tonumber(seq) > sent then return { 'BEHIND', sent } end
    names[i] = inbox .. '_' .. seq
  end
  local is_listed, has_held = redis.call('ZCARD', expiry) > 0, state[2] and state[2] ~= ''
  may_write('DEL ZREM', inbox)
  if is_listed then may_write('ZREM', expiry) end
  if has_held or taken > 0 then may_write('HSET', session) end
  local removed = redis.call('ZREM', inbox, unpack(seqs))
  redis.call('DEL', unpack(names))
  if is_listed then redis.call('ZREM', expiry, unpack(seqs)) end
  if taken > 0 then redis.call('HSET', session, 'sent', string.format('%.0f', sent), 'pushed', '') end
  if has_held then
    local acked, held = {}, {}
    for _, seq in ipairs(seqs) do acked[seq] = true end
    for each in state[2]:gmatch('%d+') do
      if not acked[each] then held[#held + 1] = each end
    end
    redis.call('HSET', session, 'held', table.concat(held, ','))
  end
  return { 'OK', removed }
end
