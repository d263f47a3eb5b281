-- whether some of those letters, from..to, are not for the MQTT session that a client has now, as the script notes: it
-- has none, or they were published before it began. Those that are stored already were for one before. Of a source,
-- positions and stamps grow together. Uses `count_up`
local function refuse_letters(total, notes, letters, from, to, has_session, mark, since, session, number)
  local first, last = nil, nil
  for i = from, to, 4 do
    if letters[i] > mark then
      if has_session and (letters[i + 1] == '' or letters[i + 1] >= since) then break end
      last = (i - from) / 4 + 1
      first = first or last
    end
  end
  if not first then return false end
  if has_session then count_up(session, 'late', last - first + 1) end
  total.late = total.late + last - first + 1
  notes[#notes + 1] = string.format('REFUSED:%d:%d:%d', number, first, last)
  return true
end
