-- the topic names in a list of filters, with their options as digits: QoS, no local, retain as published, retain
-- handling, identifier; and the list of its other filters, '' for none. What another client has written is as none
local function parted_list(list)
  local is_json, found = pcall(cjson.decode, list)
  local names, others = {}, {}
  local function number(value) return value == true and 1 or type(value) == 'number' and value or 0 end
  for _, each in ipairs(is_json and type(found) == 'table' and found or {}) do
    local name = type(each) == 'table' and each[1]
    if type(name) == 'string' and not name:find('[+#%z]') and name:sub(1, 7) ~= '$share/' then
      local flags, id = number(each[3]) % 10 * 10 + number(each[4]) % 10, number(each[6])
      names[name] = string.format('%.0f%02.0f%.0f', number(each[2]) % 10, flags, number(each[5]) % 10)
      if id > 0 then names[name] = names[name] .. string.format('%.0f', id) end
    else
      others[#others + 1] = each
    end
  end
  return names, #others > 0 and cjson.encode(others) or ''
end
