-- whether the entry is a member of a batch that is cancelled. Uses `batch_field`
local function is_batch_cancelled(cancels, entry)
  local home = (entry and batch_field(entry[2]) or ''):match('^[do](%d+%.%w+) ')
  return home and redis.call('HGET', cancels, 'batch|' .. home)
end
