-- break: takes a key from whoever holds it, as a lock and as a semaphore.
--
-- KEYS[1], KEYS[2]  the state of the lock and of the semaphore (see common.lua)
-- ARGV[1]           who does it, for people
-- ARGV[2]           for how many milliseconds that is remembered
--
-- Replies how many holders there were.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local broken = 0
for _, key in ipairs(KEYS) do
  local state = load(key, now)
  broken = broken + #state.holders
  for _, held in ipairs(state.holders) do
    if not held.parked then
      state.notices[#state.notices + 1] = {
        owner = held.owner, channel = held.channel,
        message = table.concat({ 'b', held.owner, key, ARGV[1] }, '\t'),
      }
    end
  end
  state.holders = {}
  conclude(state)
end
if broken > 0 then
  redis.call('SET', string.sub(KEYS[1], 1, -2) .. 'b', ARGV[1], 'PX', ARGV[2])
end
return broken
