-- notes outcomes of members of a batch, each once, and sends its callbacks: see fire_batch. `changes`, flat: block, first
-- and last number, outcome. A higher outcome replaces a lower one, so what comes twice, or late, changes nothing. Who has
-- left counts, too. Returns whether there is such a batch. Uses `batch_keys`, `fire_batch`
local function count_batch(prefix, home, changes)
  local ranks = { counted = 1, expired = 2, failed = 3, cancelled = 4, done = 5 }
  local names = { 'counted', 'expired', 'failed', 'cancelled', 'done' }
  local keys, sums, offsets, bits, blocks = batch_keys(prefix, home), {}, {}, {}, {}
  if not keys then return false end
  local function add(field, number) sums[field] = (sums[field] or 0) + number end
  local function note()
    local known = #bits > 0 and redis.call('BITFIELD', keys.members, unpack(bits)) or {}
    for i, before in ipairs(known) do
      local rank = bits[4 * i]
      if before > rank then redis.call('BITFIELD', keys.members, 'SET', 'u4', bits[4 * i - 1], before) end
      if before < rank then add(names[rank], 1) end
      if before == 0 then
        add('total', 1)
        add('total|' .. blocks[i], 1)
      elseif before < rank then
        add(names[before], -1)
      end
    end
    bits, blocks = {}, {}
  end
  for i = 1, #changes, 4 do
    local block, rank = changes[i], ranks[changes[i + 3]]
    local offset = offsets[block] or redis.call('HGET', keys.state, 'block|' .. block)
    if not offset then
      offset = redis.call('HINCRBY', keys.state, 'blocks', 1) - 1
      redis.call('HSET', keys.state, 'block|' .. block, offset)
    end
    offsets[block] = offset
    for number = changes[i + 1], math.min(changes[i + 2], 999) do
      local n = #bits
      bits[n + 1], bits[n + 2], bits[n + 3], bits[n + 4] = 'SET', 'u4', '#' .. offset * 1000 + number, rank
      blocks[#blocks + 1] = block
      if n > 2000 then note() end
    end
  end
  note()
  for field, number in pairs(sums) do
    if number ~= 0 then redis.call('HINCRBY', keys.state, field, number) end
  end
  fire_batch(keys, false)
  return true
end
