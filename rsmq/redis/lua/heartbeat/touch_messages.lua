#!lua flags=allow-oom
-- PURPOSE  Reset the idle time of messages in flight, so that no other member claims them (shared distribution).
-- KEYS     1 stream  2 dead-letter stream
-- ARGV     1 owner  2 group  3 keep:int, of dead letters  4..15 a lost body's dlq.* fields  16.. stream ids in flight
-- RETURNS  {{ids that another consumer has now}, {lost ids}}
-- WHY      The owner is checked first: an unconditional XCLAIM by a process that slept would steal the message back.
--          XCLAIM drops a message whose entry was deleted: then it becomes a dead letter in the same step.
-- USES     bury_lost, may_write, can_write
if #ARGV > 15 then can_write('XCLAIM', KEYS[1], 'XADD', KEYS[2]) end
local taken, lost = {}, {}
for i = 16, #ARGV do
  local id = ARGV[i]
  local row = redis.call('XPENDING', KEYS[1], ARGV[2], id, id, 1)[1]
  if row and row[2] ~= ARGV[1] then
    taken[#taken + 1] = id
  elseif row and #redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[1], 0, id, 'JUSTID') == 0 then
    bury_lost(KEYS[2], ARGV[3], id, unpack(ARGV, 4, 15))
    lost[#lost + 1] = id
  end
end
return { taken, lost }
