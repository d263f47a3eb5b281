-- ends the call before it has written anything, if a later write would be refused: pairs of commands (in one text) and
-- a key; by a right that is missing, or by the type of the key
local function can_write(...)
  local writes, types = { ... }, { X = 'stream', Z = 'zset', H = 'hash' }
  for i = 1, #writes, 2 do
    local key, found = writes[i + 1], redis.call('TYPE', writes[i + 1]).ok
    for command in writes[i]:gmatch('%a+') do
      local wanted, is_key_only = types[command:sub(1, 1)], command == 'DEL' or command == 'UNLINK'
      if not redis.acl_check_cmd(command, key, unpack(is_key_only and {} or { '1', '1', '1' })) then
        error(redis.error_reply('NOPERM this user has no right to ' .. command .. ' ' .. key))
      elseif wanted and found ~= 'none' and found ~= wanted then
        error(redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. found .. ', and not a ' .. wanted))
      end
    end
  end
end
