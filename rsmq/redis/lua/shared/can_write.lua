-- ends the call before it has written anything, if a later write would be refused: pairs of commands (in one text) and
-- a key; by a right that is missing, or by the type of the key. Uses `may_write`
local function can_write(...)
  local writes, types = { ... }, { X = 'stream', Z = 'zset', H = 'hash' }
  may_write(...)
  for i = 1, #writes, 2 do
    local wanted, key = types[writes[i]:match('%f[%a][XZH]')], writes[i + 1]
    local found = wanted and redis.call('TYPE', key).ok
    if wanted and found ~= 'none' and found ~= wanted then
      error(redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. found .. ', and not a ' .. wanted))
    end
  end
end
