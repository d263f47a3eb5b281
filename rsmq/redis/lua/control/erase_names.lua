#!lua flags=allow-oom
-- PURPOSE  Forget unique names of a key: those that are the key, and those whose delayed message has it.
-- KEYS     1 unique hash  2 delayed zset
-- ARGV     1 cursor ('0' = from the start)  2 count:int (look at so many, about)  3 key
-- RETURNS  {next cursor, forgotten:int}
-- WHY      The record of a delayed message has its body. A message that is still delayed keeps its name.
-- USES     is_id, name_record
local part = struct.pack('>I4', 3) .. 'key' .. struct.pack('>I4', #ARGV[3]) .. ARGV[3]
local page, forgotten = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2]), 0
for i = 1, #page[2], 2 do
  local _, _, _, packed = name_record(page[2][i + 1])
  local is_its = page[2][i] == ARGV[3] or packed and packed:find(part, 1, true)
  if is_its and not (packed and packed ~= '' and redis.call('ZSCORE', KEYS[2], packed)) then
    forgotten = forgotten + redis.call('HDEL', KEYS[1], page[2][i])
  end
end
return { page[1], forgotten }
