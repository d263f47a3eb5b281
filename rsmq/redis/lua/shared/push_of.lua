-- the ring that brings a letter along, and what `pushed` notes of it: of QoS 1, without an expiry of its publisher, and
-- small, because a gateway's doorbell has those of all its clients in one buffer. Else a plain ring.
-- It counts as sent only when its reader has named it (`taken_push`): after a failover that has lost it, another letter
-- may have its seq. Until then the next letters only ring. `call_name`: no other call of any process has it
local function push_of(state, before, seq, call_name, letter)
  local kind, flags = letter:byte(15, 16)
  local can_push = kind == 254 and flags % 4 == 1 and flags % 16 < 8 and #letter <= 1024
  if not can_push or not state[7] or not state[8] or (state[9] or '') ~= '' then return '' end
  local pushed = seq .. ':' .. call_name
  return state[7] .. ' ' .. state[8] .. ':' .. before .. ':' .. pushed .. ':' .. letter, pushed
end
