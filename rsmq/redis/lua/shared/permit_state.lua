-- who holds and who waits for the permits of a name, from its text; an empty one, and true, if another client has
-- written something else there
local function permit_state(text)
  local none = { held = {}, waits = {} }
  if not text then return none, false end
  local is_json, state = pcall(cjson.decode, text)
  if not is_json or type(state) ~= 'table' then return none, true end
  for _, part in ipairs({ 'held', 'waits' }) do
    if type(state[part]) ~= 'table' then return none, true end
    for member, row in pairs(state[part]) do
      if type(member) ~= 'string' or type(row) ~= 'table' then return none, true end
      for i = 1, 3 do
        local value = row[i]
        if type(value) ~= 'number' or not (value >= 0 and value < 1e15) then return none, true end
      end
    end
  end
  return state, false
end
