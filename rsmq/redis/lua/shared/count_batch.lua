-- notes outcomes of members of a batch, each once, and sends its callbacks: see fire_batch. `changes`, flat: block, first
-- and last number, outcome. A higher outcome replaces a lower one, so what comes twice, or late, changes nothing. Who has
-- left counts, too. Four bits for each member, read and written in words of eight: a block is 125 words. Returns whether
-- there is such a batch. Uses `batch_keys`, `fire_batch`
local function count_batch(prefix, home, changes)
  local ranks = { counted = 1, expired = 2, failed = 3, cancelled = 4, done = 5 }
  local names = { 'counted', 'expired', 'failed', 'cancelled', 'done' }
  local units = { [0] = 16 ^ 7, 16 ^ 6, 16 ^ 5, 16 ^ 4, 16 ^ 3, 256, 16, 1 }
  local keys, sums, offsets, words, indexes = batch_keys(prefix, home), {}, {}, {}, {}
  if not keys then return false end
  local function add(field, number) sums[field] = (sums[field] or 0) + number end
  for i = 1, #changes, 4 do
    local block = changes[i]
    local offset = offsets[block] or redis.call('HGET', keys.state, 'block|' .. block)
    if not offset then
      offset = redis.call('HINCRBY', keys.state, 'blocks', 1) - 1
      redis.call('HSET', keys.state, 'block|' .. block, offset)
    end
    offsets[block] = tonumber(offset)
    for word = math.floor(changes[i + 1] / 8), math.floor(math.min(changes[i + 2], 999) / 8) do
      local index = offset * 125 + word
      if not words[index] then words[index], indexes[#indexes + 1] = 0, index end
    end
  end
  for first = 1, #indexes, 1000 do
    local asked = {}
    for i = first, math.min(first + 999, #indexes) do
      local n = #asked
      asked[n + 1], asked[n + 2], asked[n + 3] = 'GET', 'u32', '#' .. indexes[i]
    end
    for i, word in ipairs(redis.call('BITFIELD', keys.members, unpack(asked))) do words[indexes[first + i - 1]] = word end
  end
  local changed = {}
  for i = 1, #changes, 4 do
    local block, rank, total = changes[i], ranks[changes[i + 3]], 0
    for number = changes[i + 1], math.min(changes[i + 2], 999) do
      local index, unit = offsets[block] * 125 + math.floor(number / 8), units[number % 8]
      local before = math.floor(words[index] / unit) % 16
      if before < rank then
        words[index], changed[index] = words[index] + (rank - before) * unit, true
        add(names[rank], 1)
        if before > 0 then add(names[before], -1) else total = total + 1 end
      end
    end
    if total > 0 then
      add('total', total)
      add('total|' .. block, total)
    end
  end
  local told = {}
  for _, index in ipairs(indexes) do
    local n = #told
    if changed[index] then told[n + 1], told[n + 2], told[n + 3], told[n + 4] = 'SET', 'u32', '#' .. index, words[index] end
    if n > 2000 then
      redis.call('BITFIELD', keys.members, unpack(told))
      told = {}
    end
  end
  if #told > 0 then redis.call('BITFIELD', keys.members, unpack(told)) end
  for field, number in pairs(sums) do
    if number ~= 0 then redis.call('HINCRBY', keys.state, field, number) end
  end
  fire_batch(keys, false)
  return true
end
