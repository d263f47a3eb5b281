#!lua flags=allow-oom
-- PURPOSE  Take the exclusive right to a partition, under a new epoch.
-- KEYS     1 lease hash  2 stream
-- ARGV     1 owner  2 ttl_ms:int  3 reader ("client-id address" of the connection that will read)
--          4 absent owner or ''  5 presence channel of the absent owner, or '' where it is on another node  6 group
-- RETURNS  {'OK', epoch, previous owner, last other owner's reader} or {'HELD', owner or '' if unknown, remaining_ms}
-- WHY      Every grant has its own epoch, so a late writer of an earlier grant is told apart, the same owner's too.
--          An owner that is absent may be replaced before its time; that nobody listens is checked here once more,
--          so that a member that has just come back keeps its lease. Where the record is gone (deleted by hand, or
--          lost in a failover) but consumers are there, one of them may still read: it is waited for as long as it
--          could believe in its lease. The consumer is made here, since Redis 7.0 makes none for a read that waits.
--          The reader of the last other owner is kept in `before`: an owner that asks again, since the answer was
--          lost, is told once more whom to cut off.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function has_readers()
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[2], ARGV[6])
  for _, each in ipairs(consumers.err and {} or consumers) do
    if each[2] ~= ARGV[1] then return true end
  end
  return false
end

local lease = redis.call('HMGET', KEYS[1], 'owner', 'until_ms', 'reader', 'before')
if not lease[1] and redis.call('EXISTS', KEYS[1]) == 0 and has_readers() then
  redis.call('HSET', KEYS[1], 'owner', '', 'until_ms', string.format('%.0f', now + ARGV[2]), 'reader', '')
  return { 'HELD', '', tonumber(ARGV[2]) }
end
local owner = lease[1] or ''
local left = tonumber(lease[2] or 0) - now
if owner ~= ARGV[1] and left > 0 then
  if owner == '' or owner ~= ARGV[4] then return { 'HELD', owner, left } end
  if ARGV[5] ~= '' and redis.call('PUBSUB', 'NUMSUB', ARGV[5])[2] > 0 then return { 'HELD', owner, left } end
end
local before = (owner == ARGV[1] and lease[4] or owner ~= ARGV[1] and lease[3]) or ''
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'until_ms', string.format('%.0f', now + ARGV[2]), 'reader', ARGV[3],
  'before', before)
redis.pcall('XGROUP', 'CREATECONSUMER', KEYS[2], ARGV[6], ARGV[1])
return { 'OK', tostring(epoch), owner, before }
