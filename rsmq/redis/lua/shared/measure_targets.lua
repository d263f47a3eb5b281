-- the lengths of what outputs are stored in, by index in KEYS from the fourth on: streams up to one index, delayed zsets up
-- to another, then strings (1: it is there). Ends the call if one of them could not be written. Uses `may_write`, `can_append`
local function measure_targets(streams, zsets)
  local lengths = {}
  for index = 4, #KEYS do
    local write = index <= streams and 'XADD' or index <= zsets and 'ZADD' or 'SET'
    lengths[index] = redis.call(({ XADD = 'XLEN', ZADD = 'ZCARD', SET = 'EXISTS' })[write], KEYS[index])
    may_write(write, KEYS[index])
    if write ~= 'SET' then can_append((KEYS[index]:gsub(':delayed$', ''))) end
  end
  return lengths
end
