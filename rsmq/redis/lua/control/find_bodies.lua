#!lua flags=no-writes
-- PURPOSE  Find the names of bodies in streams of one slot, from where the last call has ended.
-- KEYS     1.. streams: a partition and its dead letters, or an out-stream
-- ARGV     1 folder of the bodies, with its `/`  2 count:int of entries of each stream  3.. of each stream the id of the
--          last entry that was read, `0-0` at first
-- RETURNS  {is_more:0|1, {id of the last entry, for each stream}, {name, ...}}
-- WHY      One call reads the ends of all streams of a partition at one moment: what moves between them while pages are
--          read is found behind one of the ids. An entry that is packed into one field is searched as text, so a text
--          in it that looks like a name keeps a body, and no name is missed.
-- USES     body_names
local is_more, ids, found = 0, {}, {}
for position = 1, #KEYS do
  local last = ARGV[2 + position]
  local page = redis.call('XRANGE', KEYS[position], '(' .. last, '+', 'COUNT', ARGV[2])
  for _, entry in ipairs(page) do
    for i = 1, #entry[2], 2 do
      local name = entry[2][i]
      if name == 'ref' or name == 'dlq.packed' or name == 'packed' then
        body_names(entry[2][i + 1], ARGV[1], found)
      end
    end
    last = entry[1]
  end
  if #page >= tonumber(ARGV[2]) then is_more = 1 end
  ids[position] = last
end
return { is_more, ids, found }
