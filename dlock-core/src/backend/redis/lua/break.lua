-- break: takes a key from whoever holds it.
--
-- KEYS[1]  the lock or the semaphore (see state.lua)
-- ARGV[1]  who does it, for people
-- ARGV[2]  for how many microseconds the key stays taken, so that holders hear of it
--          before somebody else is let in
-- ARGV[3]  the token of the holder that is meant; without it all are
--
-- Replies how many holders there were.

local key, now, delay = KEYS[1], clock(), tonumber(ARGV[2])
local token = ARGV[3] and tonumber(ARGV[3])
local broken = 0
local state = load(key, now, '')
local holders, waiters = holders_of(state)
state.until_ = now
for _, waiter in ipairs(waiters) do
  keep_until(state, waiter.asked + waiter.queue_ttl)
end
local function take_from(held)
  broken = broken + 1
  if not held.parked then
    state.notices[#state.notices + 1] = {
      owner = held.owner, channel = held.channel,
      message = table.concat({ 'b', held.owner, key, ARGV[1] }, '\t'),
    }
  end
  -- Nobody holds what was released. What was broken stays as it is: a second break must
  -- not cut the delay of the first one short.
  if held.parked == '1' or delay == 0 then
    remove_holder(state, held)
  else
    held.parked = '2'
    prolong(state, held, math.min(held.expires, now + delay))
  end
end
for _, held in ipairs(holders) do
  if token and held.first ~= token then
    keep_until(state, held.expires)
  else
    take_from(held)
  end
end
conclude(state)
return broken
