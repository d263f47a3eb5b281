-- a stream id as text that sorts as ids do: both halves may exceed the 53 bits of a number; nil if it is no id
local function order(id)
  local ms, seq = id:match('^0*(%d+)%-0*(%d+)')
  return ms and ('0'):rep(20 - #ms) .. ms .. ('0'):rep(20 - #seq) .. seq
end
