-- appends a report of a run to the history of a schedule, of which the last 20 stay; one of the same tick is replaced
local function note_run(key, name, report)
  local lines, tick = {}, report:match('^{"tick":(%-?%d+)')
  for line in (redis.call('HGET', key, 'history|' .. name) or ''):gmatch('[^\n]+') do lines[#lines + 1] = line end
  if tick and #lines > 0 and lines[#lines]:match('^{"tick":(%-?%d+)') == tick then lines[#lines] = nil end
  lines[#lines + 1] = report
  redis.call('HSET', key, 'history|' .. name, table.concat(lines, '\n', math.max(1, #lines - 19)))
end
