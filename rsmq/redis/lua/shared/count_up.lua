-- counts in a field of a hash; one that is no number is counted anew
local function count_up(hash, field, n)
  if type(redis.pcall('HINCRBY', hash, field, n)) == 'table' then redis.call('HSET', hash, field, n) end
end
