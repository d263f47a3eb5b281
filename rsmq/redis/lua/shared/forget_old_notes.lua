-- removes some of a group's notes about messages below `floor`: they were settled by an attempt that has not used them.
-- Uses `order`
local function forget_old_notes(stream, group, floor)
  local progress, steps = stream .. ':' .. group .. ':progress', stream .. ':' .. group .. ':steps'
  if redis.call('EXISTS', progress, steps) == 0 then return end
  local function forget(notes)
    for _, field in ipairs(redis.pcall('HRANDFIELD', notes, 100)) do
      local at = order(field)
      if not at or at < order(floor) then redis.call('HDEL', notes, field) end
    end
  end
  forget(progress)
  forget(steps)
end
