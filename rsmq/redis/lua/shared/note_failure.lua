-- notes a failed attempt in the field of its message. The notes before it, at most nine, are a JSON list in `<id>|past`:
-- an older version reads and writes only the newest one. A call that is repeated replaces its own note
local function note_failure(errors, id, attempts, now, error)
  local note, before = string.format('%.0f %.0f ', attempts, now), redis.call('HGET', errors, id)
  if not before and redis.call('HLEN', errors) >= 10000 then return end
  if before and before:gsub('^(%d+) %d+', '%1') ~= note:match('^%d+') .. ' ' .. error then
    local is_list, past = pcall(cjson.decode, redis.call('HGET', errors, id .. '|past') or '[]')
    if not is_list or type(past) ~= 'table' or past[1] == nil then past = {} end
    local cut = before:sub(1, 300)
    if #cut < #before then cut = cut:gsub('[\128-\191]*$', ''):gsub('[\192-\255]$', '') end -- not within a character
    past[#past + 1] = cut
    if #past > 9 then table.remove(past, 1) end
    redis.call('HSET', errors, id .. '|past', cjson.encode(past))
  end
  redis.call('HSET', errors, id, note .. error)
end
