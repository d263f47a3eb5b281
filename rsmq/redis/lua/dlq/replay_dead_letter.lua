-- PURPOSE  Publish a dead letter again.
-- KEYS     1 stream  2 dead-letter stream
-- ARGV     1 dead letter's id  2 group  3 max_length:int (0 = no limit)  4 on_full:reject|trim
-- RETURNS  {'OK', stream id}, {'FULL'}, {'GONE'}, {'ELSEWHERE'} (it has no body here) or {'PACKED', packed fields}
-- WHY      The right to XDEL is checked first: if it were refused after the XADD, each try would leave another copy.
--          The field `group` addresses the new entry to the group that failed; the other groups have handled the
--          message. Without its expiry: it was replayed on purpose. With its steps: what its handler has done is done.
-- USES     unpacked_fields, lay_steps
if not redis.acl_check_cmd('XDEL', KEYS[2], ARGV[1]) then
  return redis.error_reply('NOPERM this user may not replay: it has no right to XDEL')
end
local entry = redis.call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1]
if not entry then return { 'GONE' } end
local max = tonumber(ARGV[3])
if max > 0 and ARGV[4] ~= 'trim' and redis.call('XLEN', KEYS[1]) >= max then return { 'FULL' } end
local fields, steps = {}, nil
for i = 1, #entry[2], 2 do
  local name = entry[2][i]
  if name == 'dlq.packed' then return { 'PACKED', entry[2][i + 1] } end
  if name == 'dlq.body' then return { 'ELSEWHERE' } end
  if name == 'dlq.steps' then steps = entry[2][i + 1] end
  if name:sub(1, 4) ~= 'dlq.' and name ~= 'group' and name ~= 'expires' and name ~= 'on_expiry' then
    fields[#fields + 1] = name
    fields[#fields + 1] = entry[2][i + 1]
  end
end
if #fields == 0 then return { 'ELSEWHERE' } end
fields[#fields + 1] = 'group'
fields[#fields + 1] = ARGV[2]
if steps and not redis.acl_check_cmd('HSET', KEYS[1] .. ':' .. ARGV[2] .. ':steps', '1', '1') then
  return redis.error_reply('NOPERM this user may not replay: it has no right to HSET, for the steps of the message')
end
local id = redis.call('XADD', KEYS[1], '*', unpack(fields))
if steps then lay_steps(KEYS[1], ARGV[2], id, steps) end
redis.call('XDEL', KEYS[2], ARGV[1])
return { 'OK', id }
