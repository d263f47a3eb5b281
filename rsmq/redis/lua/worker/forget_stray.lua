-- PURPOSE  Delete a stream that is empty.
-- KEYS     1 stream
-- ARGV     none
-- RETURNS  deleted:0|1
-- WHY      A publisher may add an entry between a look and the deletion.
if redis.call('XLEN', KEYS[1]) > 0 then return 0 end
return redis.call('UNLINK', KEYS[1])
