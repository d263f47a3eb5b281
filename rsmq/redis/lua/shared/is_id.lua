-- whether a text is a stream id: two numbers of 64 bits
local function is_id(text)
  local ms, seq = text:match('^(%d+)%-(%d+)$')
  local function fits(digits) return #digits < 20 or (#digits == 20 and digits <= '18446744073709551615') end
  return ms ~= nil and fits(ms) and fits(seq)
end
