-- PURPOSE  Replace the subscriptions of an MQTT client, and tell every router what has changed.
-- KEYS     1 subscriptions hash  2 changes stream
-- ARGV     1 client  2 epoch  3 its whole list ('' = none)  4 changes to keep:int  5 messages that new ones do not meet (JSON, '' = none)
-- RETURNS  'OK', 'SHARED' (the list before had shared subscriptions), 'NONE' (there was nothing to remove)
--          or 'STALE_EPOCH'
-- WHY      The whole list is written, so applying a change twice is harmless. A connection that was taken over writes
--          nothing any more: the entry has the epoch of the newest one. Changes are numbered without gaps, so that a
--          reader which missed some knows it, and reads the hash again. Where another client has written something else,
--          there is no older epoch and no number: readers read the hash again. A client that subscribes again to what it
--          has, as most do with each connect, changes nothing: then only its epoch is written.
-- USES     whole, dict, may_write, can_append
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old and (whole(old:match('^(%d+)|')) or 0) > tonumber(ARGV[2]) then return 'STALE_EPOCH' end
may_write('HSET HDEL', KEYS[1], 'XADD', KEYS[2])
local had_shares = old and old:find('"$share/', 1, true) and 'SHARED' or 'OK'
if old and ARGV[3] ~= '' and old:match('^%d+|(.*)$') == ARGV[3] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. '|' .. ARGV[3])
  return had_shares
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
can_append(KEYS[2])
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. '|' .. ARGV[3])
elseif old then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  return 'NONE'
end
local number = (last and whole(last[2][2]) or 0) + 1
local change = { 'n', string.format('%.0f', number), 'c', ARGV[1], 'v', ARGV[3] }
if ARGV[5] ~= '' then change[7], change[8] = 'b', ARGV[5] end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', unpack(change))
return had_shares
