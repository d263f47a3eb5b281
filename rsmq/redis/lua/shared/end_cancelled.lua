-- after the acknowledgement of a cancelled message: it leaves its batch, who waits for its result hears of it, what an
-- attempt before has noted goes, and it is known as cancelled. Uses `batch_field`, `leave_batch`, `keep_failure`, `take_notes`
local function end_cancelled(stream, group, id, entry, cancels, cancelled)
  local member = entry and batch_field(entry[2])
  if member then leave_batch(stream, group, { { member, 'cancelled', '' } }) end
  if entry then keep_failure(stream, group, entry[2], 'cancelled', 'it was cancelled') end
  take_notes(stream, group, id)
  redis.call('HDEL', cancels, id)
  redis.call('ZADD', cancelled, id:match('^%d+'), id)
end
