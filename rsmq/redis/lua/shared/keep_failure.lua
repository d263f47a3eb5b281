-- keeps that a message has ended without a result, for its publisher, who has asked to keep one (the field `keep_result`):
-- a head as JSON. `fields`: of its entry
local function keep_failure(stream, group, fields, reason, error)
  local ms, id
  for i = 1, #fields - 1, 2 do
    if fields[i] == 'keep_result' then ms = fields[i + 1]:match('^[1-9]%d*$') end
    if fields[i] == 'id' then id = fields[i + 1] end
  end
  if not id or not ms or #ms > 12 then return end
  local head = cjson.encode({ reason = reason, error = error })
  redis.pcall('SET', stream .. ':' .. group .. ':result:' .. id, head .. '\n', 'PX', ms)
  redis.pcall('SPUBLISH', stream .. ':' .. group .. ':result:' .. id, '')
end
