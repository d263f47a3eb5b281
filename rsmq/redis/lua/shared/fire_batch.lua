-- sends the callbacks of a batch that is complete, or whose time is over (`is_over`): each of them once. One that was
-- cancelled before its publisher has closed it is no success: not all of its members are counted. On one server the
-- message is stored here, in the step that finds it complete; on a cluster, and where that fails, it waits as
-- `pending|...` for a worker (end_batches). `keys`: of the batch, by count_batch or its callers
local function fire_batch(keys, is_over)
  local found = redis.call('HMGET', keys.state, 'closed', 'total', 'done', 'failed', 'cancelled', 'expired', 'ended_ms',
    'succeeded_ms', 'name', 'opened_ms', 'keep_ms', 'cancelled_ms')
  if not found[1] and not is_over then return end
  local total, done, failed, cancelled, expired = unpack(found, 2, 6)
  total, done, failed = tonumber(total or 0), tonumber(done or 0), tonumber(failed or 0)
  cancelled, expired = tonumber(cancelled or 0), tonumber(expired or 0)
  local missing = total - done - failed - cancelled - expired
  local is_complete = found[1] and missing == 0
  for block, count in (is_complete and found[1] or ''):gmatch('(%w+)=(%d+)') do
    local counted = tonumber(redis.call('HGET', keys.state, 'total|' .. block) or 0)
    is_complete = is_complete and counted >= tonumber(count)
  end
  local calls, time, prefix = {}, redis.call('TIME'), keys.state:match('^.-:{')
  local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
  local due = string.format('%.0f', now + found[11])
  if (is_complete or is_over) and not found[7] then
    calls[1] = { 'on_complete', is_complete and 'complete' or 'abandoned', 'ended_ms' }
  end
  local is_cut = found[12] and found[1] == ''
  if is_complete and done == total and not is_cut and not found[8] then
    calls[#calls + 1] = { 'on_success', 'success', 'succeeded_ms' }
  end
  for _, call in ipairs(calls) do
    local how, stream = (redis.call('HGET', keys.state, call[1]) or ''):match('^(%a)(.*)$')
    local data = string.format('{"batch":%s,"id":"%s","total":%.0f,"done":%.0f,"failed":%.0f,"cancelled":%.0f,'
      .. '"expired":%.0f,"missing":%.0f,"state":"%s","started_ms":%s,"ended_ms":%s}', cjson.encode(found[9]), keys.home,
      total, done, failed, cancelled, expired, missing, call[2], found[10], now)
    local entry = { 'data', data, 'id', keys.home .. '.' .. call[1], 'key', found[9] }
    local is_ours = how == 'd' and stream:sub(1, #prefix) == prefix
    local is_stored = is_ours and type(redis.pcall('XADD', stream, '*', unpack(entry))) == 'string'
    redis.call('HSET', keys.state, 'state', call[2], call[3], now)
    if how and not is_stored then
      redis.call('HSET', keys.state, 'pending|' .. call[1], data)
      due = now
    end
  end
  if #calls > 0 then redis.call('ZADD', keys.due, due, keys.home) end
end
