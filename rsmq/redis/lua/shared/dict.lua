-- a flat reply (name, value, ...) as a table
local function dict(flat)
  local out = {}
  for i = 1, #flat, 2 do out[flat[i]] = flat[i + 1] end
  return out
end
