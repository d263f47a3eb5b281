-- the score of a delayed message: its due time in ms, and above those of the same millisecond that came before it by a
-- fraction, of which 4 095 fit; a user without the right to ZRANGE gets the time alone
local function delay_score(delayed, due)
  local time = string.format('%.0f', due)
  local until_next = string.format('(%.0f', due + 1)
  local last = redis.pcall('ZRANGE', delayed, until_next, time, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
  if last.err or #last == 0 then return time end
  return string.format('%.17g', math.min(last[2] + 1 / 4096, due + 4095 / 4096))
end
