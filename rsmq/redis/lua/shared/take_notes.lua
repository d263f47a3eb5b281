-- removes what the handler of a message has noted on its way: its progress and its steps. Returns the steps as a field of
-- its dead letter, packed (name, result, ...), or nothing. In `steps` the field of a message itself has their names. Without
-- the right to it, or with keys of another type, it does nothing: no message may stand still for that
local function take_notes(stream, group, id)
  local progress, steps = stream .. ':' .. group .. ':progress', stream .. ':' .. group .. ':steps'
  if not (redis.acl_check_cmd('HDEL', steps, id) and redis.acl_check_cmd('HGET', steps, id)) then return {} end
  if redis.call('TYPE', progress).ok == 'hash' then redis.call('HDEL', progress, id) end
  local names = redis.call('TYPE', steps).ok == 'hash' and redis.call('HGET', steps, id)
  if not names then return {} end
  local packed, fields = {}, { id }
  for name in names:gmatch('[^|]+') do
    local result = #fields <= 100 and redis.call('HGET', steps, id .. '|' .. name)
    if result then
      packed[#packed + 1] = struct.pack('>I4', #name) .. name .. struct.pack('>I4', #result) .. result
      fields[#fields + 1] = id .. '|' .. name
    end
  end
  redis.call('HDEL', steps, unpack(fields))
  return #packed > 0 and { 'dlq.steps', table.concat(packed) } or {}
end
