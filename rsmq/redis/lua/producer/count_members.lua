-- PURPOSE  Note in a batch what its publisher, an operator or the relay of a partition says about its members.
-- KEYS     1 state hash  2 members string  3 due zset (named so that a cluster has all of them in one place, or waits)
-- ARGV     1 home (shard and id)  2 what: left, added, topic, closed or cancelled  3 a topic, or of closed how many members
--          of each block its publisher has stored, `block=count ...`
--          4.. changes: block, first and last number, outcome
-- RETURNS  'OK', 'ENDED' (its callback has been sent, or it is cancelled: it takes no more members) or 'GONE' (it is not
--          there, or another client has written into it)
-- WHY      A batch that is not there is not made again: its records may come late, or twice. `added` follows the publish
--          of its members, so that it waits for none that was not stored. `closed` says how many the publisher has stored:
--          after a failover that has lost one of its calls the batch is not complete too early. All may come twice.
-- USES     batch_keys, fire_batch, count_batch, may_write, can_write
local prefix = KEYS[1]:match('^(.-):{')
local keys = batch_keys(prefix, ARGV[1])
if not keys then return 'GONE' end
can_write('HSET HINCRBY', keys.state, 'BITFIELD', keys.members, 'ZADD', keys.due)
local ended, closed, cancelled = unpack(redis.call('HMGET', keys.state, 'ended_ms', 'closed', 'cancelled_ms'))
local is_publisher = ARGV[2] == 'added' or ARGV[2] == 'closed' or ARGV[2] == 'topic'
if is_publisher and (cancelled or ended and not closed) then return 'ENDED' end
if ended and ARGV[2] == 'added' then return 'ENDED' end
if ARGV[2] == 'topic' then redis.call('HSET', keys.state, 'topic|' .. ARGV[3], 1) end
if ARGV[2] == 'closed' then redis.call('HSET', keys.state, 'closed', ARGV[3]) end
if ARGV[2] == 'cancelled' and not ended then
  local time = redis.call('TIME')
  redis.call('HSETNX', keys.state, 'cancelled_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
  redis.call('HSETNX', keys.state, 'closed', '')
end
return pcall(function() count_batch(prefix, ARGV[1], { unpack(ARGV, 4) }) end) and 'OK' or 'GONE'
