-- the server's time in ms; due times move back as far as its clock was set back since the last call. `field` of the
-- lease hash: for what waits for a time, where scores up to 2 are marks, and a fraction of .5 says something, too
local function follow_clock(lease, retry, field)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local seen = tonumber(redis.call('HGET', lease, field or 'clock'))
  if not seen or not (seen >= 0 and seen < 1e15) then seen = 0 end -- of another client: it is written anew
  if now < seen - 1000 then
    local all = redis.call('ZRANGEBYSCORE', retry, '(2', '+inf', 'WITHSCORES')
    for i = 1, #all, 2 do redis.call('ZADD', retry, string.format('%.1f', all[i + 1] + now - seen), all[i]) end
  end
  if math.abs(now - seen) > 1000 then redis.call('HSET', lease, field or 'clock', string.format('%.0f', now)) end
  return now
end
