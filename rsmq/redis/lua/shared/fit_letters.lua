-- the end of those letters, from..to, that an inbox has room for without dropping others; expired ones make room first.
-- Those at or below the mark are stored already, and take none. Notes how many have room, and how many letters have
-- left the inbox by its client: of all that were stored, those that are neither there, nor dropped, nor expired. Uses
-- `whole` and `make_room`
local function fit_letters(total, notes, letters, from, to, mark, inbox, session, expiry, limit, now, number)
  local room = limit - redis.call('ZCARD', inbox)
  if room >= (to - from + 1) / 4 then return to end
  local _, expired = make_room(total, inbox, session, expiry, 0, now)
  room = room + expired
  for i = from, to, 4 do
    if letters[i] > mark then room = room - 1 end
    if room < 0 then
      local said = redis.call('HMGET', session, 'seq', 'dropped', 'expired')
      local left = (whole(said[1]) or 0) - (whole(said[2]) or 0) - (whole(said[3]) or 0) - redis.call('ZCARD', inbox)
      notes[#notes + 1] = string.format('NO_ROOM:%d:%d:%d', number, (i - from) / 4, left)
      return i - 1
    end
  end
  return to
end
