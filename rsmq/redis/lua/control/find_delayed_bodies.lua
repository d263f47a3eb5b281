#!lua flags=no-writes
-- PURPOSE  Find the names of bodies among delayed messages, page by page.
-- KEYS     1 delayed zset
-- ARGV     1 folder of the bodies, with its `/`  2 cursor, `0` at first  3 count:int
-- RETURNS  {next cursor, `0` at the end, {name, ...}}
-- WHY      ZSCAN returns each message that is there from the first call to the last, also while others are released:
--          pages by rank would skip some then.
-- USES     body_names
local page, found = redis.call('ZSCAN', KEYS[1], ARGV[2], 'COUNT', ARGV[3]), {}
for i = 1, #page[2], 2 do body_names(page[2][i], ARGV[1], found) end
return { page[1], found }
