-- inspect: who holds a key and who waits for it. Changes nothing.
--
-- KEYS[1], KEYS[2]  the lock and the semaphore (see state.lua)
-- KEYS[3]           where it is remembered who broke it
--
-- Replies { now in microseconds, who broke it last or '', { holder ... },
-- { waiter ... } }, the lock's before the semaphore's, the dead left out.

local now = clock()
local holders, waiters = {}, {}
for _, key in ipairs({ KEYS[1], KEYS[2] }) do
  local state = load(key, now, '')
  local held, waiting = holders_of(state)
  if state.lone then
    state.lone.expires = state.lone.expires - 1000 -- the millisecond that may be left
  end
  for _, holder in ipairs(held) do
    holders[#holders + 1] = write_holder(holder)
  end
  for _, waiter in ipairs(waiting) do
    waiters[#waiters + 1] = write_waiter(waiter)
  end
end
return { text(now), call('GET', KEYS[3]) or '', holders, waiters }
