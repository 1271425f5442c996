-- release, when others hold the key or wait for it, or it is to stay taken.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local state = load(key, now, found)
local reply = 'l'
for _, held in ipairs(state.holders) do
  if held.owner == owner then
    reply = 'r'
  end
end
local held = held_by(state, owner)
if held and ARGV[2] ~= '' then
  held.parked, held.expires = true, now + tonumber(ARGV[2])
else
  remove(state, owner)
end
settle(state)
save(state)
tell(state)
return reply
