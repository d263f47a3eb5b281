-- notes in a session what a source has stored: the last seq, the source's mark and, where needed, until when it is kept
-- and that it is not idle, or which letter went along with a ring: each field of HSET costs about a hundredth of a letter
local function note_letters(session, last, source, mark, till, is_renewed, rings, pushed)
  if pushed then
    redis.call('HSET', session, 'seq', last, source, mark, 'until_ms', till, 'pushed', pushed)
  elseif rings then
    redis.call('HSET', session, 'seq', last, source, mark, 'until_ms', till, 'idle', '0')
  elseif is_renewed then
    redis.call('HSET', session, 'seq', last, source, mark, 'until_ms', till)
  else
    redis.call('HSET', session, 'seq', last, source, mark)
  end
  if is_renewed then redis.call('PEXPIREAT', session, till) end
end
