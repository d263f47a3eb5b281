-- ids of rows (16 bytes each) that a relay has appended, without those that it has deleted meanwhile: as a list, and by id
local function kept_rows(rows, deleted)
  local kept, known, gone = {}, {}, {}
  if not rows or #rows % 16 ~= 0 or rows == deleted then return kept, known end
  for at = 1, #deleted, 16 do gone[deleted:sub(at, at + 15)] = true end
  for at = 1, #rows, 16 do
    local id = rows:sub(at, at + 15)
    if not gone[id] then kept[#kept + 1], known[id] = id, true end
  end
  return kept, known
end
