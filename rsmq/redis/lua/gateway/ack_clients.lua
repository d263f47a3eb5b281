#!lua flags=allow-oom
-- PURPOSE  Remove letters that MQTT clients have acknowledged: of many clients, on a cluster of one.
-- KEYS     per client: messages zset, session hash, expiry zset
-- ARGV     1 one array of MessagePack, per client: epoch, the letter it took from a ring as `pushed` has it ('' = none),
--          seqs with commas
-- RETURNS  per client the reply of ack_letters
-- WHY      Each client has its own epoch, so one that was taken over elsewhere holds up no other. A call that fails at
--          one client may have removed letters of others: it may be repeated, for each of them by itself.
-- USES     whole, may_write, seq_of_push, taken_push, remove_acked
local replies, list = {}, cmsgpack.unpack(ARGV[1])
for key = 1, #KEYS, 3 do
  local seqs = {}
  for seq in list[key + 2]:gmatch('%d+') do seqs[#seqs + 1] = seq end
  replies[#replies + 1] = remove_acked(KEYS[key], KEYS[key + 1], KEYS[key + 2], list[key], seqs, list[key + 1])
end
return replies
