#!lua flags=allow-oom
-- PURPOSE  Take the exclusive right to a partition, under a new epoch.
-- KEYS     1 lease hash  2 stream
-- ARGV     1 owner  2 ttl_ms:int  3 reader ("client-id address" of the connection that will read)
--          4 absent owner or ''  5 presence channel of the absent owner, or '' where it is on another node  6 group
--          7 longest lease of a member of the group in ms, or '' if the caller has not asked
--          8 above:int, an epoch that a store outside knows, or absent
-- RETURNS  {'OK', epoch, previous owner, other readers, one a line, run} or {'HELD', owner or '' if unknown, remaining_ms}
--          or {'UNKNOWN'}: ask for the longest lease and call again
-- WHY      Every grant has its own epoch, so a late write under an earlier grant is refused, even from the same owner.
--          Epochs also grow with the clock: stores outside keep the highest one they have seen, and must not refuse the
--          true owner after FLUSHALL, or after a failover that has lost the last grants. A store that knows a higher
--          one all the same (the clock was set back, or the server is another one) is asked for it: `above`.
--          An absent owner may be replaced before its lease ends. The script checks again that its channel has no
--          subscriber, so that a member that has just come back keeps its lease. If the record is gone (deleted by
--          hand, or lost in a failover) but the group has consumers, the previous reader is unknown and may still read,
--          so the partition stays unowned for the longest lease of a member. If the clock is set back meanwhile, that
--          wait begins again: no member would end it. The same if its owner has lost the lease but lives: `ttl` is the
--          epoch and the length of the grant, and no grant has more time left than that. The consumer is created here, because Redis 7.0 creates none for
--          a blocking read. Every other connection that may still read is returned, newest first, and kept in
--          `before` until an owner that has cut them off claims: an owner that asks again after a lost reply, and the
--          next one if this owner never gets that far, learn the same ones.
-- USES     whole
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function has_readers()
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[2], ARGV[6])
  for _, each in ipairs(consumers.err and {} or consumers) do
    if each[2] ~= ARGV[1] then return true end
  end
  return false
end

local lease = redis.call('HMGET', KEYS[1], 'owner', 'until_ms', 'reader', 'before', 'epoch', 'ttl', 'run')
local owner = lease[1] or ''
local left = (whole(lease[2]) or 0) - now
local is_set_back = owner == '' and left > math.max(tonumber(ARGV[2]), tonumber(ARGV[7]) or 0)
if is_set_back or not lease[1] and has_readers() then
  if ARGV[7] == '' then return { 'UNKNOWN' } end
  redis.call('HSET', KEYS[1], 'owner', '', 'until_ms', string.format('%.0f', now + ARGV[7]), 'reader', '')
  return { 'HELD', '', tonumber(ARGV[7]) }
end
local epoch, ttl = (lease[6] or ''):match('^(%d+) (%d+)$')
if owner ~= '' and epoch == lease[5] and left > tonumber(ttl) then
  left = tonumber(ttl)
  redis.call('HSET', KEYS[1], 'until_ms', string.format('%.0f', now + left))
end
if owner ~= ARGV[1] and left > 0 then
  if owner == '' or owner ~= ARGV[4] then return { 'HELD', owner, left } end
  if ARGV[5] ~= '' and redis.call('PUBSUB', 'NUMSUB', ARGV[5])[2] > 0 then return { 'HELD', owner, left } end
end
local others, seen = {}, { [ARGV[3]] = true }
for reader in ((lease[3] or '') .. '\n' .. (lease[4] or '')):gmatch('[^\n]+') do
  if not seen[reader] and #others < 16 then others[#others + 1] = reader end
  seen[reader] = true
end
local before = table.concat(others, '\n')
epoch = string.format('%.0f', math.max((whole(lease[5]) or 0) + 1, now, (ARGV[8] or 0) + 1))
if not lease[1] and lease[7] then -- of a deleted group only the run was left, for a time
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'run', lease[7])
end
redis.call('HSET', KEYS[1], 'epoch', epoch, 'owner', ARGV[1], 'until_ms', string.format('%.0f', now + ARGV[2]), 'reader', ARGV[3],
  'before', before, 'ttl', epoch .. ' ' .. ARGV[2])
redis.pcall('XGROUP', 'CREATECONSUMER', KEYS[2], ARGV[6], ARGV[1])
return { 'OK', epoch, owner, before, whole(lease[7]) and lease[7] or '0' }
