-- the stream id that follows another one
local function next_id(id)
  local last = '18446744073709551615'
  local function plus_one(digits)
    local head, nines = digits:match('^(.-)(9*)$')
    return (head == '' and '1' or head:sub(1, -2) .. (head:sub(-1) + 1)) .. ('0'):rep(#nines)
  end
  local ms, seq = id:match('^(%d+)%-(%d+)$')
  if seq ~= last then return ms .. '-' .. plus_one(seq) end
  return ms ~= last and plus_one(ms) .. '-0' or id
end
