-- the seq of a letter that went along with a ring, as `pushed` has it; 0 if that is of another client. Uses `whole`
local function seq_of_push(pushed) return whole(pushed:match('^(%d+):')) or 0 end
