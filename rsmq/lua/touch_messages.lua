-- PURPOSE  Keep messages in hand from looking abandoned (shared distribution).
-- KEYS     1 stream
-- ARGV     1 owner  2 group  3.. stream ids in hand
-- RETURNS  the ids that are no longer mine
-- WHY      Only if still mine: an unconditional XCLAIM by a process that slept would steal the message back.
local lost = {}
for i = 3, #ARGV do
  local row = redis.call('XPENDING', KEYS[1], ARGV[2], ARGV[i], ARGV[i], 1)[1]
  if row and row[2] == ARGV[1] then
    redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[1], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
