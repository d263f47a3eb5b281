-- the last delivered id of a group; nil without it. Uses `dict`
local function last_delivered(stream, group)
  local rows = redis.pcall('XINFO', 'GROUPS', stream)
  for _, row in ipairs(rows.err and {} or rows) do
    local found = dict(row)
    if found.name == group then return found['last-delivered-id'] end
  end
end
