-- acquire, when others hold the key or wait for it.

if spare > 0 then
  -- Given back before anybody else is given later ones.
  redis.call('INCRBY', counter, text(-spare))
end
local state = load(key, now, found)
if instead_of ~= '' then
  remove(state, instead_of)
end

local function finish(reply)
  save(state)
  tell(state, owner)
  return reply
end

local held = held_by(state, owner)
if held then
  held.expires = now + ttl
  return finish({ 'g', held.first, held.count })
end

local place = state.queued and redis.call('HGET', key .. 'w', owner)
local asking = place and parse_waiter(owner, place)
if place and now >= asking.asked + asking.patience then
  remove(state, owner)
  place, asking = nil, nil
end
asking = asking
  or { mode = mode, take = take, of = of, tokens = tonumber(ARGV[8]), since = now,
    channel = ARGV[11], info = ARGV[12] }
asking.asked, asking.patience, asking.sent = now, tonumber(ARGV[9]), ARGV[10]

local function keep_asking()
  redis.call('HSET', key .. 'w', owner, write_waiter(asking))
  state.waits_until = math.max(state.waits_until, now + asking.patience)
  local lasts = math.ceil((state.waits_until - now) / 1000) + 1
  redis.call('PEXPIRE', key .. 'q', lasts)
  redis.call('PEXPIRE', key .. 'w', lasts)
end

if place then
  keep_asking()
end
settle(state)

-- Settling may just have given it to this very claim: then this reply says so,
-- with a whole ttl, and no notice is needed.
held = held_by(state, owner)
if held then
  held.expires = now + ttl
  return finish({ 'g', held.first, held.count })
end

if not state.queued and fits(state, mode, take, of) then
  first, count = mint_for(state, mode, tonumber(ARGV[8]))
  state.holders[#state.holders + 1] = {
    owner = owner, mode = mode, take = take, of = of, first = first, count = count,
    since = now, expires = now + ttl, parked = false, channel = ARGV[11], info = ARGV[12],
  }
  return finish({ 'g', first, count })
end

local holder = state.holders[1] and state.holders[1].info or ''
if ARGV[6] ~= '1' then
  return finish({ 'b', holder })
end
if not place then
  redis.call('RPUSH', key .. 'q', owner)
  state.queued = true
  keep_asking()
end
local free_in = -1
for _, other in ipairs(state.holders) do
  local left = other.expires - now
  if free_in < 0 or left < free_in then
    free_in = left
  end
end
return finish({ 'q', holder, free_in })
