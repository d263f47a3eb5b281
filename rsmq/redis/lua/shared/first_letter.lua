-- stores a letter without an expiry of its own, if its device has no key yet; returns whether that was so. It is tried
-- where the device before was new, because the next one often is, too: one question here instead of the usual two
local function first_letter(inbox, session, letters, at, source, plain, tail, moment, latest, till)
  local call, published = redis.call, letters[at + 1]
  if letters[at + 2] ~= '' or call('EXISTS', session, inbox) > 0 then return false end
  local stamp = published == '' and plain or published .. tail
  call('SET', inbox .. '_1', stamp .. letters[at + 3], 'PXAT', latest)
  call('ZADD', inbox, '1', '1')
  call('PEXPIREAT', inbox, till)
  call('HSET', session, 'seq', '1', source, letters[at] .. moment, 'until_ms', till)
  call('PEXPIREAT', session, till)
  call('SPUBLISH', inbox:sub(1, -9) .. 'wake', '')
  return true
end
