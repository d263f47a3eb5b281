-- a dead letter for a message whose body is gone. A stream that takes no entries any more refuses it, and stops nothing:
-- then the caller's log is all that names the message
local function bury_lost(dlq, keep, id, ...)
  redis.pcall('XADD', dlq, 'MAXLEN', '~', keep, '*', 'dlq.origin', id, ...)
end
