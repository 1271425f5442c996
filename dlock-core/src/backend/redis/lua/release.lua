-- release, when others hold the key or wait for it, or it is to stay taken.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local state = load(key, now, found)
local held = held_by(state, owner)
local reply = 'l'
if held and ARGV[2] ~= '' then
  reply = 'r'
  if not held.parked then
    held.parked, held.expires = true, now + tonumber(ARGV[2])
  end
else
  if held then
    reply = 'r'
  end
  remove(state, owner)
end
settle(state)
save(state)
tell(state)
return reply
