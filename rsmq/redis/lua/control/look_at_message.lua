#!lua flags=no-writes
-- PURPOSE  Read where one message of a partition is for one group.
-- KEYS     1 stream  2 lease hash  3 retry zset  4 errors hash  5 cancels hash  6 cancelled zset  7 waits zset, or none
-- ARGV     1 group  2 stream id  3 key or ''  4 most attempts to look for:int  5 count:int (rows before it to look at)
-- RETURNS  {now_ms, last delivered id or '' (no such group), consumer, idle_ms, deliveries, attempts when parked or -1,
--          due_ms, note on the last failed attempt, stream id of the pending message that holds its key, owner,
--          its mark in cancels, or `done` if it is cancelled, notes on the failed attempts before the last,
--          until when it waits for a time: ms since 1970, or '', how far its handler has come (JSON), or ''}
-- WHY      One moment: a message that moves between the pending list and the retry set is in one of them.
-- USES     dict, last_delivered, find_parked
local stream, group, id = KEYS[1], ARGV[1], ARGV[2]
local time, last = redis.call('TIME'), last_delivered(stream, group) or ''
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local reply = { now, last, '', 0, 0, -1, '0', '', '', '', '', '', '', '' }
if last == '' then return reply end
local row = redis.call('XPENDING', stream, group, id, id, 1)[1]
if row then reply[3], reply[4], reply[5] = row[2], row[3], row[4] end
local most = redis.call('EXISTS', KEYS[3]) == 0 and -1 or tonumber(ARGV[4])
local attempts, due = find_parked(KEYS[3], id, row, most)
if attempts then reply[6], reply[7] = attempts, string.format('%.0f', due) end
reply[8], reply[12] = redis.call('HGET', KEYS[4], id) or '', redis.call('HGET', KEYS[4], id .. '|past') or ''
if row and reply[6] < 0 and ARGV[3] ~= '' then
  for _, before in ipairs(redis.call('XPENDING', stream, group, '-', '(' .. id, ARGV[5])) do
    local entry = redis.call('XRANGE', stream, before[1], before[1])[1]
    for i = 1, entry and #entry[2] or 0, 2 do
      if entry[2][i] == 'key' and entry[2][i + 1] == ARGV[3] then reply[9] = before[1] end
    end
    if reply[9] ~= '' then break end
  end
end
reply[10] = redis.call('HMGET', KEYS[2], 'owner')[1] or ''
reply[11] = redis.call('ZSCORE', KEYS[6], id) and 'done' or redis.call('HGET', KEYS[5], id) or ''
local waits = row and KEYS[7] and redis.call('ZSCORE', KEYS[7], id)
if waits then reply[13] = string.format('%.0f', math.floor(waits)) end
local progress = (row or attempts) and redis.pcall('HGET', stream .. ':' .. group .. ':progress', id)
if type(progress) == 'string' then reply[14] = progress end
return reply
