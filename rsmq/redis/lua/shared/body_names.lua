-- adds each name of a body in this folder that a text has to `found`: 64 hex digits, a dot, 32 hex digits
local function body_names(text, folder, found)
  local first, last = text:find(folder, 1, true)
  while first do
    found[#found + 1] = text:sub(first, last + 97)
    first, last = text:find(folder, last + 1, true)
  end
end
