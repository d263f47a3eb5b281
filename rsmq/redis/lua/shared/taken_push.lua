-- the seq up to which a reader that names the letter it took from a ring has been sent letters; 0 if it names none, or
-- one that the server has lost: `pushed` is another one then. Uses `seq_of_push`
local function taken_push(pushed, named) return pushed ~= '' and pushed == named and seq_of_push(pushed) or 0 end
