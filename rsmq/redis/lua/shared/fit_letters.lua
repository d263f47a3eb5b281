-- the end of those letters, from..to, that an inbox has room for without dropping others; expired ones make room first.
-- Those at or below the mark are stored already, and take none. Notes the first one without room, and the oldest seq
local function fit_letters(letters, from, to, mark, inbox, session, expiry, limit, now, full, number)
  local room = limit - redis.call('ZCARD', inbox)
  if room >= (to - from + 1) / 4 then return to end
  local _, expired = make_room(inbox, session, expiry, 0, now)
  if expired > 0 then redis.call('HINCRBY', session, 'expired', expired) end
  room = room + expired
  for i = from, to, 4 do
    if letters[i] > mark then room = room - 1 end
    if room < 0 then
      full[#full + 1] = string.format('%d:0:%d:%s', number, (i - from) / 4, redis.call('ZRANGE', inbox, 0, 0)[1] or '')
      return i - 1
    end
  end
  return to
end
