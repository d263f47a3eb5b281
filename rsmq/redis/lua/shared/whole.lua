-- a field that is a whole number, such as a time in ms; nil if it is not there, or another client has spoiled it
local function whole(text)
  return text and #text <= 16 and text:match('^%d+$') and tonumber(text) or nil
end
