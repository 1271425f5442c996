-- renew, of leases that are not alone on their keys, or change their mode.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function renew(key, found, owner, mode, ttl)
  local state = load(key, now, found)
  local held = held_by(state, owner)
  local reply = 'l'
  if held then
    held.expires = now + ttl
    if held.mode == 'x' then
      held.mode = mode -- an old renewal must not turn it back
    end
    settle(state)
    reply = front(state) and 'w' or 'h'
  end
  settle(state)
  save(state)
  tell(state)
  return reply
end

for _, i in ipairs(rest) do
  -- A key may stand in the list twice, so what was found before is not used.
  local done, reply = pcall(function()
    return renew(KEYS[i], redis.call('GET', KEYS[i]), ARGV[5 * i - 4], ARGV[5 * i - 3],
      tonumber(ARGV[5 * i]))
  end)
  if done then
    replies[i] = reply
  elseif type(reply) == 'table' then
    replies[i] = reply
  else
    replies[i] = redis.error_reply('ERR ' .. reply)
  end
end
return replies
