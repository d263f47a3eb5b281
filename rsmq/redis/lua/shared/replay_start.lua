-- the stream id before a limit from which on entries are kept for a replay: those that are younger than an age, or are
-- among the newest `keep` that are settled. `waiting`: how many are not. Uses `order`, `is_id`
local function replay_start(marks, limit, keep, age_ms, waiting)
  local time, settled = redis.call('TIME'), nil
  local start = string.format('%.0f-0', math.max(0, time[1] * 1000 - age_ms))
  local rows = redis.call('ZREVRANGE', marks, 0, 999, 'WITHSCORES')
  for i = 1, #rows, 2 do
    if is_id(rows[i]) and order(rows[i]) < order(limit) then
      settled = settled or rows[i + 1] - waiting
      if tonumber(rows[i + 1]) <= settled - keep then
        if order(start) < order(rows[i]) then start = rows[i] end
        break
      end
    end
  end
  return order(limit) < order(start) and limit or start
end
