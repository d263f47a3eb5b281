#!lua flags=allow-oom
-- PURPOSE  Remove letters that the device has received, for its session.
-- KEYS     1 messages zset  2 session hash  3 expiry zset
-- ARGV     1 epoch  2.. seqs
-- RETURNS  {'OK', removed:int}, {'STALE_EPOCH'}, {'NO_SESSION'} or {'BEHIND', sent:int}
-- WHY      One call removes many letters. After another connection has taken the session over, this one removes
--          nothing. Without an epoch the server has lost the session (expired, deleted, FLUSHALL): seqs start anew
--          then, so an old one must remove nothing either. A seq above all that was sent has been lost by the server,
--          and may have been given to another letter since: then nothing is removed.
-- USES     whole, may_write, seq_of_push, taken_push, remove_acked
return remove_acked(KEYS[1], KEYS[2], KEYS[3], ARGV[1], { unpack(ARGV, 2) })
