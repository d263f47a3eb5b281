-- what is noted under a unique name: till, message id, stream id ('' = delayed), packed entry; nothing if another client
-- has written something else there. Uses `is_id`
local function name_record(packed)
  local is_packed, record = pcall(cmsgpack.unpack, packed)
  if not is_packed or type(record) ~= 'table' then return nil end
  for i = 1, 4 do
    if type(record[i]) ~= 'string' then return nil end
  end
  local till, id = record[1], record[3]
  if till ~= 'settled' and till ~= 'started' and not (till:match('^%d+$') and #till < 16) then return nil end
  if id ~= '' and not is_id(id) then return nil end
  return unpack(record, 1, 4)
end
