-- such a field as it is, or another text where it is none. Uses `whole`
local function whole_or(text, other) return whole(text) and text or other end
