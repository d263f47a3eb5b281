#!lua flags=allow-oom
-- PURPOSE  Hold a name in a group, end that, or take the right to try it once.
-- KEYS     1 group hash
-- ARGV     1 name ('': all messages of the group)  2 duration:ms  3 kind: handler, command or breaker
--          4 what to do: set, longer (no hold that is there gets shorter), probe or end
--          5 the end that the caller knows:ms, or '': otherwise a probe or an end does nothing  6 most names:int
-- RETURNS  {'OK', until:ms (0: not held)}, {'CHANGED', until:ms} or {'FULL', 0}
-- WHY      All holds of a group are one field, which its members read with the group anyway. One that is over is removed
--          by the next call, but that of a breaker stays: its name is tried by one message first. Who takes the right
--          to do so prolongs the hold for all others, so if it dies another one tries later.
-- USES     may_write, can_write
can_write('HSET HDEL', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local is_json, found = pcall(cjson.decode, redis.call('HGET', KEYS[1], 'holds') or '{}')
local holds, number = {}, 0
for name, each in pairs(is_json and type(found) == 'table' and found or {}) do
  if type(name) == 'string' and type(each) == 'table' and type(each[1]) == 'number' and type(each[2]) == 'number' then
    local ends = each[1] + (each[3] == 'breaker' and 86400000 or 0)
    if ends > now or name == ARGV[1] then
      holds[name], number = { each[1], each[2], tostring(each[3]) }, number + 1
    end
  end
end
local current = holds[ARGV[1]]
local ends, what = current and current[1] or 0, ARGV[4]
if ARGV[5] ~= '' and tonumber(ARGV[5]) ~= ends or what == 'probe' and ends > now then return { 'CHANGED', ends } end
local til = now + ARGV[2]
if what == 'end' then
  holds[ARGV[1]] = nil
  til = 0
elseif what == 'longer' and ends >= til then
  til = ends
elseif not current and number >= tonumber(ARGV[6]) then
  return { 'FULL', 0 }
else
  holds[ARGV[1]] = { til, ends > now and current[2] or now, ARGV[3] }
end
if next(holds) then
  redis.call('HSET', KEYS[1], 'holds', cjson.encode(holds))
else
  redis.call('HDEL', KEYS[1], 'holds')
end
return { 'OK', til }
