#!lua flags=no-writes
-- PURPOSE  Find a delayed message by its id.
-- KEYS     1 delayed zset
-- ARGV     1 message id  2 least due:ms  3 greatest due:ms or '+inf'  4 offset:int  5 count:int (look at so many at most)
-- RETURNS  {packed entry or '', due_ms, seen:int}; fewer seen than `count` and no entry: it is not there
-- WHY      The packed entry is the only copy of the message. The field `id` is searched for as it is packed.
local wanted = struct.pack('>I4', 2) .. 'id' .. struct.pack('>I4', #ARGV[1]) .. ARGV[1]
-- from the latest on: what becomes due between two calls would move the rest to offsets that were looked at
local found = redis.call('ZRANGE', KEYS[1], ARGV[3], ARGV[2], 'BYSCORE', 'REV', 'LIMIT', ARGV[4], ARGV[5], 'WITHSCORES')
for i = 1, #found, 2 do
  local packed, at, is_name = found[i], 1, true
  if packed:find(wanted, 1, true) then -- the same bytes may stand in a payload, so walk over the fields
    while at + 3 <= #packed do
      if is_name and packed:sub(at, at + #wanted - 1) == wanted then return { packed, found[i + 1], i } end
      local size = struct.unpack('>I4', packed, at)
      at, is_name = at + 4 + size, not is_name
    end
  end
end
return { '', '0', #found / 2 }
