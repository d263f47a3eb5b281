-- PURPOSE  Try every command that rsmq uses, on scratch keys that are deleted before this returns.
-- KEYS     1 scratch stream  2 scratch hash  3 scratch zset  4 scratch string  5 scratch set
-- ARGV     1 channel without subscribers
-- RETURNS  flat list: command, the error of the server, ... (empty: all commands work)
-- WHY      A version number does not show what a server supports or what its ACL allows this user; a try does.
local failed = {}
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    failed[#failed + 1] = select(1, ...) .. (select(1, ...) == 'XGROUP' and ' ' .. select(2, ...) or '')
    failed[#failed + 1] = reply.err
    return nil
  end
  return reply
end

local stream = KEYS[1]
try('TIME')
try('XGROUP', 'CREATE', stream, 'g', '0', 'MKSTREAM')
local id = try('XADD', stream, 'MAXLEN', '~', 10, '*', 'data', '') or '1-0'
try('TYPE', stream)
try('XLEN', stream)
try('XRANGE', stream, '-', '+', 'COUNT', 1)
try('XREADGROUP', 'GROUP', 'g', 'c', 'COUNT', 1, 'STREAMS', stream, '>')
try('XPENDING', stream, 'g', '-', '+', 1)
try('XCLAIM', stream, 'g', 'd', 0, id, 'FORCE', 'RETRYCOUNT', 0, 'JUSTID')
local claimed = try('XAUTOCLAIM', stream, 'g', 'c', 0, '0-0', 'COUNT', 1, 'JUSTID')
if claimed and #claimed < 3 then
  failed[#failed + 1] = 'XAUTOCLAIM'
  failed[#failed + 1] = 'unknown third element: the server does not report deleted entries'
end
local groups = try('XINFO', 'GROUPS', stream)
try('XACK', stream, 'g', id)
try('XGROUP', 'DELCONSUMER', stream, 'g', 'c')
try('XTRIM', stream, 'MINID', '=', '0-1')
try('XDEL', stream, id)
try('XGROUP', 'DESTROY', stream, 'g')
try('HSET', KEYS[2], 'f', '1')
try('HINCRBY', KEYS[2], 'f', 1)
try('HMGET', KEYS[2], 'f')
try('HSETNX', KEYS[2], 'f', '1')
try('HGET', KEYS[2], 'f')
try('HGETALL', KEYS[2])
try('HRANDFIELD', KEYS[2], 1)
try('HDEL', KEYS[2], 'f')
try('ZADD', KEYS[3], 1, 'm')
try('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
try('ZRANGEBYSCORE', KEYS[3], '-inf', '+inf', 'LIMIT', 0, 1)
try('ZREVRANGE', KEYS[3], 0, 0)
try('ZSCORE', KEYS[3], 'm')
try('ZCARD', KEYS[3])
try('ZREM', KEYS[3], 'm')
try('ZREMRANGEBYSCORE', KEYS[3], 0, 1)
try('SET', KEYS[4], '1', 'NX', 'PX', 1000)
try('BITFIELD', KEYS[4], 'GET', 'u4', 0)
try('GET', KEYS[4])
try('MGET', KEYS[4])
try('PEXPIRE', KEYS[4], 1000)
try('EXISTS', KEYS[4])
try('DEL', KEYS[4])
try('SADD', KEYS[5], 'm')
try('SMEMBERS', KEYS[5])
try('SREM', KEYS[5], 'm')
try('PUBLISH', ARGV[1], '')
try('PUBSUB', 'NUMSUB', ARGV[1])
try('UNLINK', unpack(KEYS))

-- the lag of a group exists since 7.0; every backlog that rsmq shows is based on it
if groups then
  local has_lag = false
  for i = 1, #groups[1], 2 do has_lag = has_lag or groups[1][i] == 'lag' end
  if not has_lag then
    failed[#failed + 1] = 'XINFO'
    failed[#failed + 1] = 'unknown field: the server does not report the lag of a group'
  end
end
return failed
