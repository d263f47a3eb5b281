-- drops the old marks of sources of a session that has many fields
local function forget_marks(session, before_ms)
  if redis.call('HLEN', session) <= 48 then return end
  local fields = redis.call('HGETALL', session)
  for i = 1, #fields, 2 do
    local at = fields[i]:sub(1, 7) == 'source:' and tonumber(fields[i + 1]:match('@(%d+)$'))
    if at and at * 1000 < before_ms then redis.call('HDEL', session, fields[i]) end
  end
end
