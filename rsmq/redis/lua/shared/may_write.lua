-- ends the call before it has written anything, if the user has no right to a later write: pairs of commands (in one
-- text) and a key. It is for keys whose type an earlier read, or the first write of the call, refuses if it is another
local function may_write(...)
  local writes, is_allowed = { ... }, redis.acl_check_cmd
  for i = 1, #writes, 2 do
    local key = writes[i + 1]
    for command in writes[i]:gmatch('%a+') do
      local is_key_only = command == 'DEL' or command == 'UNLINK'
      if not (is_key_only and is_allowed(command, key) or not is_key_only and is_allowed(command, key, '1', '1', '1')) then
        error(redis.error_reply('NOPERM this user has no right to ' .. command .. ' ' .. key))
      end
    end
  end
end
