-- break: takes a key from whoever holds it, as a lock and as a semaphore.
--
-- KEYS[1], KEYS[2]  the lock and the semaphore (see state.lua)
-- KEYS[3]           where it is remembered who broke it
-- ARGV[1]           who does it, for people
-- ARGV[2]           for how many milliseconds that is remembered
-- ARGV[3]           for how many microseconds the key stays taken, so that holders
--                   hear of it before somebody else is let in
--
-- Replies how many holders there were.

local now, delay = clock(), tonumber(ARGV[3])
local broken = 0
for _, key in ipairs({ KEYS[1], KEYS[2] }) do
  local state = load(key, now, '')
  local holders, waiters = holders_of(state)
  state.until_ = now
  for _, waiter in ipairs(waiters) do
    keep_until(state, waiter.asked + waiter.patience)
  end
  for _, held in ipairs(holders) do
    broken = broken + 1
    if not held.parked then
      state.notices[#state.notices + 1] = {
        owner = held.owner, channel = held.channel,
        message = table.concat({ 'b', held.owner, key, ARGV[1] }, '\t'),
      }
    end
    if held.parked or delay == 0 then
      remove_holder(state, held)
    else
      held.parked = true
      prolong(state, held, math.min(held.expires, now + delay))
    end
  end
  conclude(state)
end
if broken > 0 then
  call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
end
return broken
