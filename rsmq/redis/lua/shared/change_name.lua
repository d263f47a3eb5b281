-- what replaces the options of a client's subscription to a topic name (nil = it ends; `had` = what it has): edits of the
-- names hash and of what all routers follow, as { command, key, field, value }, and changes to announce, as { field,
-- list }. Returns by how many the subscriptions that are looked up by name grow, nil if routers follow the name.
-- A name with more than 64 subscribers is followed: a router that looked it up would read all of them again and again.
local function change_name(names, followed, name, client, options, had, edits, changes)
  local value = redis.call('HGET', names, name) or ''
  local function follow(who, digits)
    local field, list = who .. '\0' .. name, ''
    if digits then
      local each = { name, tonumber(digits:sub(1, 1)) }
      for i = 2, 3 do each[i + 1] = digits:sub(i, i) == '1' end
      each[5], each[6] = tonumber(digits:sub(4, 4)), tonumber(digits:match('^%d%d%d%d(%d+)') or 0)
      list = cjson.encode({ each })
    end
    edits[#edits + 1] = digits and { 'HSET', followed, field, list } or { 'HDEL', followed, field }
    changes[#changes + 1] = { field, list }
  end
  local crowd = value:match('^%z(%d+)$')
  if crowd then
    local left = crowd + (options and 1 or 0) - (had and 1 or 0)
    follow(client, options)
    edits[#edits + 1] = left > 0 and { 'HSET', names, name, '\0' .. left } or { 'HDEL', names, name }
    return nil
  end
  local others, parts, was, at = {}, {}, nil, 1
  while at do
    local middle = value:find('\0', at, true)
    local last = middle and value:find('\0', middle + 1, true)
    if last then
      local who, digits = value:sub(at, middle - 1), value:sub(middle + 1, last - 1)
      if who == client then
        was = digits
      elseif digits:find('^%d%d%d%d') then
        others[#others + 1] = { who, digits }
        parts[#parts + 1] = value:sub(at, last)
      end
    end
    at = last and last + 1
  end
  if options and #others >= 64 then
    for _, each in ipairs(others) do follow(each[1], each[2]) end
    follow(client, options)
    edits[#edits + 1] = { 'HSET', names, name, '\0' .. (#others + 1) }
    return -#others - (was and 1 or 0)
  end
  if options then parts[#parts + 1] = client .. '\0' .. options .. (was and was:match('!.*') or '') .. '\0' end
  edits[#edits + 1] = parts[1] and { 'HSET', names, name, table.concat(parts) } or { 'HDEL', names, name }
  return (options and 1 or 0) - (was and 1 or 0)
end
