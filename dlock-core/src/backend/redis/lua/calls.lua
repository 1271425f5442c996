-- calls, on keys that others hold or wait for, or that stay taken.

local now = clock()
local second = {}

function second.a(key, at, instead_of)
  local owner, mode, take, of = parse_head(ARGV[at])
  local channel, info = string.match(ARGV[at + 1], '^\t0\t0\t([^\t]*)\t(.*)$')
  local ttl, tokens = ARGV[at + 2] * 1000, tonumber(ARGV[at + 3])
  local queue, patience, sent = string.match(ARGV[at + 4], '^(%d)\t(%d+)\t(%d+)$')
  local state = load(key, now)
  if instead_of then
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
  if asking and now >= asking.asked + asking.patience then
    remove(state, owner)
    asking = nil
  end
  local waits = not not asking
  asking = asking or { mode = mode, take = take, of = of, tokens = tokens, since = now,
    channel = channel, info = info }
  asking.asked, asking.patience, asking.sent = now, tonumber(patience), sent

  local function keep_asking()
    redis.call('HSET', key .. 'w', owner, write_waiter(asking))
    state.waits_until = math.max(state.waits_until, now + asking.patience)
    local lasts = math.ceil((state.waits_until - now) / 1000) + 1
    redis.call('PEXPIRE', key .. 'q', lasts)
    redis.call('PEXPIRE', key .. 'w', lasts)
  end

  if waits then
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
    local token, count = mint_for(state, mode, tokens)
    state.holders[#state.holders + 1] = {
      owner = owner, mode = mode, take = take, of = of, first = token, count = count,
      since = now, expires = now + ttl, parked = false, channel = asking.channel, info = asking.info,
    }
    return finish({ 'g', token, count })
  end

  local holder = state.holders[1] and state.holders[1].info or ''
  if queue ~= '1' then
    return finish({ 'b', holder })
  end
  if not waits then
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
end

function second.i(key, at)
  return second.a(key, at, owner_of(ARGV[at + 5]))
end

function second.r(key, at)
  local state = load(key, now)
  local owner, mode = parse_head(ARGV[at])
  local held = held_by(state, owner)
  local reply = 0
  if held then
    held.expires = now + ARGV[at + 1] * 1000
    if held.mode == 'x' then
      held.mode = mode -- an old renewal must not turn it back
    end
    settle(state)
    reply = front(state) and 2 or 1
  end
  conclude(state)
  return reply
end

function second.x(key, at, stays)
  local owner = owner_of(ARGV[at])
  local state = load(key, now)
  local reply = 0
  for _, held in ipairs(state.holders) do
    if held.owner == owner then
      reply = 1
    end
  end
  local held = held_by(state, owner)
  if held and stays then
    held.parked, held.expires = true, now + stays
  else
    remove(state, owner)
  end
  conclude(state)
  return reply
end

function second.p(key, at)
  return second.x(key, at, tonumber(ARGV[at + 1]))
end

make(#rest, function(i)
  local call, letter, from = unpack(rest[i])
  made = call
  replies[call] = second[letter](KEYS[call], from)
end)
return replies
