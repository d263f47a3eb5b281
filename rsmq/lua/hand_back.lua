-- PURPOSE  Give back messages that were fetched but not finished, for the next owner to take at once.
-- KEYS     1 stream  2 lease hash
-- ARGV     1 owner  2 epoch ('' = shared)  3 group  4.. stream id, attempts to leave charged
-- RETURNS  {'OK', handed back:int} or {'STALE_EPOCH'}
-- WHY      A planned stop is no attempt. They stay pending; in shared distribution they are made old enough to claim.
if ARGV[2] ~= '' then
  local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
  if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end
end
local idle, n = ARGV[2] == '' and 86400000 or 0, 0
for i = 4, #ARGV, 2 do
  local row = redis.call('XPENDING', KEYS[1], ARGV[3], ARGV[i], ARGV[i], 1)[1]
  if row and row[2] == ARGV[1] then
    redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[1], 0, ARGV[i], 'IDLE', idle, 'RETRYCOUNT', ARGV[i + 1], 'JUSTID')
    n = n + 1
  end
end
return { 'OK', n }
