-- the end of those letters, from..to, that an inbox has room for without dropping others; expired ones make room first.
-- Those at or below the mark are stored already, and take none. Notes the first one without room, and how many letters
-- have left the inbox by its client: of all that were stored, those that are neither there, nor dropped, nor expired
local function fit_letters(letters, from, to, mark, inbox, session, expiry, limit, now, full, number)
  local room = limit - redis.call('ZCARD', inbox)
  if room >= (to - from + 1) / 4 then return to end
  local _, expired = make_room(inbox, session, expiry, 0, now)
  if expired > 0 then count_up(session, 'expired', expired) end
  room = room + expired
  for i = from, to, 4 do
    if letters[i] > mark then room = room - 1 end
    if room < 0 then
      local said = redis.call('HMGET', session, 'seq', 'dropped', 'expired')
      local left = (whole(said[1]) or 0) - (whole(said[2]) or 0) - (whole(said[3]) or 0) - redis.call('ZCARD', inbox)
      full[#full + 1] = string.format('%d:0:%d:%d', number, (i - from) / 4, left)
      return i - 1
    end
  end
  return to
end
