-- the field `batch` of an entry, or nil: it is a member of a batch
local function batch_field(fields)
  for i = 1, #fields, 2 do
    if fields[i] == 'batch' then return fields[i + 1] end
  end
end
