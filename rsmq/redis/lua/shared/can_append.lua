-- ends the call before it has written anything, if a stream takes no entries any more. Uses `dict`
local function can_append(stream)
  local found = redis.pcall('XINFO', 'STREAM', stream)
  if not found.err and dict(found)['last-generated-id'] == '18446744073709551615-18446744073709551615' then
    error(redis.error_reply('ERR ' .. stream .. ' takes no entries any more'))
  end
end
