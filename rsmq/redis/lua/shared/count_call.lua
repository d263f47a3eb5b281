-- Whether a numbered call of the owner of a lease comes in its order: not after a later one of the same epoch.
local function count_call(lease, epoch, number)
  local last = redis.call('HGET', lease, 'call')
  local of, seen = (last or ''):match('^(%d+)|(%d+)$')
  if of == epoch and tonumber(number) <= tonumber(seen) then return false end
  redis.call('HSET', lease, 'call', epoch .. '|' .. number)
  return true
end
