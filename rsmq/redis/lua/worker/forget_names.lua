-- PURPOSE  Forget unique names whose message is there no more.
-- KEYS     1 stream  2 unique hash  3 delayed zset
-- ARGV     1 cursor ('0' = from the start)  2 count:int (look at so many, about)
-- RETURNS  {next cursor, forgotten:int, {name whose record cannot be read: it is forgotten, too...}}
-- WHY      A name is free when its message has ended, and is forgotten when retention has removed the message, or its
--          time is over. Another client may remove a message that a handler has begun with: that one is still pending.
-- USES     dict, is_id, name_record
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function is_pending(id)
  local rows = redis.pcall('XINFO', 'GROUPS', KEYS[1])
  for _, row in ipairs(rows.err and {} or rows) do
    if #redis.call('XPENDING', KEYS[1], dict(row).name, id, id, 1) > 0 then return true end
  end
  return false
end
local gone, foreign, page = {}, {}, redis.call('HSCAN', KEYS[2], ARGV[1], 'COUNT', ARGV[2])
for i = 1, #page[2], 2 do
  local till, _, id, packed = name_record(page[2][i + 1])
  local is_over = not till
  if is_over then
    foreign[#foreign + 1] = page[2][i]
  elseif tonumber(till) then
    is_over = now >= tonumber(till)
  elseif id == '' then
    is_over = not redis.call('ZSCORE', KEYS[3], packed)
  else
    is_over = #redis.call('XRANGE', KEYS[1], id, id) == 0 and not is_pending(id)
  end
  if is_over then gone[#gone + 1] = page[2][i] end
end
local forgotten = 0
for _, name in ipairs(gone) do forgotten = forgotten + redis.call('HDEL', KEYS[2], name) end
return { page[1], forgotten, foreign }
