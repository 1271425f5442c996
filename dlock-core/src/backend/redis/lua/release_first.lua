-- release: gives back a lease or a place in the queue.
--
-- KEYS[1]  the key's state (layout: see common.lua)
-- ARGV[1]  owner
-- ARGV[2]  '' to free it at once, or for how many microseconds it stays taken
--
-- Replies 'r' for released, or 'l' if it was lost before.
--
-- This part, before common.lua, is all that an undisputed lock needs: GET and
-- DEL. Where the form is '1' nobody else holds the key or waits for it.

local key, owner = KEYS[1], ARGV[1]
local found = redis.call('GET', key)
if not found then
  return 'l'
end
if string.sub(found, 1, 1) == '1' then
  if string.sub(found, 2, 33) ~= owner then
    return 'l'
  end
  if ARGV[2] == '' then
    redis.call('DEL', key)
    return 'r'
  end
end
