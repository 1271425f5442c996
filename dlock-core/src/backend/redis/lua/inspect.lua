-- inspect: who holds a key and who waits for it. Changes nothing.
--
-- KEYS[1]  the lock or the semaphore (see state.lua)
--
-- Replies { now in microseconds, { holder ... }, { waiter ... } }, the dead left out.

local now = clock()
local holders, waiters = {}, {}
local state = load(KEYS[1], now, '')
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
return { text(now), holders, waiters }
