-- the fields of a packed entry, or nil if it is none
local function unpacked_fields(packed)
  local fields, at = {}, 1
  while at <= #packed do
    local ok, value, next = pcall(struct.unpack, '>I4c0', packed, at)
    if not ok then return end
    fields[#fields + 1], at = value, next
  end
  return fields
end
