-- the keys of a batch, all in one slot; nil if there is no such batch, another client has written into its keys, or this
-- user may not: then nothing is counted, and what ends a message does not fail for that. `home`: shard and id: `3.9f2c`
local function batch_keys(prefix, home)
  local shard, id = home:match('^(%d+)%.(%w+)$')
  local stem = shard and prefix .. ':{%batches.' .. shard .. '}:'
  if not stem then return end
  local keys = { state = stem .. 'state:' .. id, members = stem .. 'members:' .. id, due = stem .. 'due', home = home }
  if redis.call('TYPE', keys.state).ok ~= 'hash' then return end
  for key, wanted in pairs({ [keys.members] = 'string', [keys.due] = 'zset' }) do
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= wanted then return end
  end
  for _, command in ipairs({ 'HGET', 'HMGET', 'HSET', 'HINCRBY' }) do
    if not redis.acl_check_cmd(command, keys.state, '1', '1', '1') then return end
  end
  if not redis.acl_check_cmd('BITFIELD', keys.members, 'SET', 'u4', '#1', '1') then return end
  return redis.acl_check_cmd('ZADD', keys.due, '1', '1') and keys
end
