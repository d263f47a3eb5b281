-- up to where a source was stored, as the text of one of its positions: digits of the same width; '' if another client
-- has written something else there, and true: then what comes again is stored again, where else nothing would come
local function mark_of(text, position)
  if not text or text == '' then return '', false end
  local is_one = not position or (text:gsub('%d', '0')) == (position:gsub('%d', '0'))
  return is_one and text or '', not is_one
end
