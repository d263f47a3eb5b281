-- notes that members of batches have left their group for good: on one server in the batch, at once; on a cluster, where
-- the batch is in another slot, in the out-stream of partition and group, which its owner relays. `leaving`: for each the
-- field `batch`, which may name more numbers of its block, the outcome, and members that its handler has added
-- (`block.number ...`). Uses `count_batch`
local function leave_batch(stream, group, leaving)
  local homes = {}
  for _, each in ipairs(leaving) do
    local home, owner, block, numbers = each[1]:match('^(%a%d+%.%w+) (%S+) (%w+) ([%d ]+)$')
    if home and (not group or owner == group or owner == '*') then
      local changes = homes[home] or { group or owner }
      homes[home] = changes
      for number in numbers:gmatch('%d+') do
        local n = #changes
        changes[n + 1], changes[n + 2], changes[n + 3], changes[n + 4] = block, number, number, each[2]
      end
      for added, at in each[3]:gmatch('(%w+)%.(%d+)') do
        for _, part in ipairs({ added, at, at, 'counted' }) do changes[#changes + 1] = part end
      end
    end
  end
  for home, changes in pairs(homes) do
    local by = table.remove(changes, 1)
    if home:sub(1, 1) == 'd' then
      pcall(function() count_batch(stream:match('^(.-):{'), home:sub(2), changes) end) -- if it is spoiled: nothing
    else
      redis.call('XADD', stream .. ':' .. by .. ':out', '*', 'out.batch', home:sub(2), 'changes', table.concat(changes, ' '))
    end
  end
end
