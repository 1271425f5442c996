-- inspect: who holds a key and who waits for it. Changes nothing.
--
-- KEYS[1], KEYS[2]  the state of the lock and of the semaphore (see common.lua)
--
-- Replies { now in microseconds, who broke it last or '', { record ... },
-- { waiter ... } }, the lock's before the semaphore's, the dead left out.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local records, waiting = {}, {}
for _, key in ipairs(KEYS) do
  local state = load(key, now)
  for _, held in ipairs(state.holders) do
    records[#records + 1] = write_record(held)
  end
  if state.queued then
    local entries = redis.call('HGETALL', key .. 'w')
    local by_owner = {}
    for i = 1, #entries, 2 do
      by_owner[entries[i]] = entries[i + 1]
    end
    for _, owner in ipairs(redis.call('LRANGE', key .. 'q', 0, -1)) do
      local waiter = by_owner[owner] and parse_waiter(owner, by_owner[owner])
      if waiter and now < waiter.asked + waiter.patience then
        waiting[#waiting + 1] = by_owner[owner]
      end
    end
  end
end
local broken = redis.call('GET', string.sub(KEYS[1], 1, -2) .. 'b')
return { text(now), broken or '', records, waiting }
