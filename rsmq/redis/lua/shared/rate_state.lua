-- the state of a rate, from its text; an empty one, and true, if another client has written something else there
local function rate_state(text)
  local none = { seen = 0, used = {}, held = {} }
  if not text then return none, false end
  local function has(row, count)
    for i = 1, count do
      local value = type(row) == 'table' and row[i]
      if type(value) ~= 'number' or not (value >= 0 and value < 1e15) then return false end
    end
    return true
  end
  local is_json, state = pcall(cjson.decode, text)
  if not is_json or type(state) ~= 'table' or not has({ state.seen }, 1) then return none, true end
  if type(state.used) ~= 'table' or type(state.held) ~= 'table' then return none, true end
  if state.even and not has({ state.even }, 1) then return none, true end
  for _, each in pairs(state.used) do
    if not has(each, 2) then return none, true end
  end
  for member, each in pairs(state.held) do
    if type(member) ~= 'string' or not has(each, 4) then return none, true end
  end
  return state, false
end
