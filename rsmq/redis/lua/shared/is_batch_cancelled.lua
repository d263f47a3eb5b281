-- whether the entry is a member of a batch that is cancelled, in the group of these marks: a fallback's message is one in
-- each group, unless its fallback names one. Uses `batch_field`
local function is_batch_cancelled(cancels, entry)
  local home, group = (entry and batch_field(entry[2]) or ''):match('^[do](%d+%.%w+) (%S+) ')
  if not home or group ~= '*' and group ~= cancels:match('}:(.*):cancels$') then return false end
  return redis.call('HGET', cancels, 'batch|' .. home)
end
