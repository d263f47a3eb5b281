-- notes in a lease hash the most attempts that a message in its retry zset was charged. Without a note, those of messages
-- that are parked already are not known. Uses `whole`
local function note_charged(lease, retry, charged)
  local most = whole(redis.call('HGET', lease, 'most_charged'))
  if not most and redis.call('EXISTS', retry) == 0 then most = -1 end
  if most and charged > most then redis.call('HSET', lease, 'most_charged', string.format('%.0f', charged)) end
end
