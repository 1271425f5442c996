-- calls, the second part: on keys that several hold or wait for, or that stay taken.

local now = clock()
local second = {}

-- One of the holders, as JSON, for people.
local function somebody(state)
  if state.lone then
    return state.lone.info
  end
  local record
  if state.holders > 0 then
    record = state.known ~= '' and get(state, 'h' .. state.known)
    if not record then
      local found = call('HSCAN', state.key, '0', 'COUNT', '16')[2]
      for i = 1, #found, 2 do
        if sub(found[i], 1, 1) == 'h' and state.fields[found[i]] ~= false then
          record = found[i + 1]
          break
        end
      end
    end
  end
  return record and match(record, string.rep('[^\t]*\t', 9) .. '(.*)$') or ''
end

-- Takes away a lease, or else a place in the queue.
local function remove(state, owner, held)
  local waiter = not held and waiter_of(state, owner)
  if held then
    remove_holder(state, held)
  elseif waiter then
    remove_waiter(state, waiter)
  end
end

function second.a(key, at, instead_of)
  local owner = sub(ARGV[at], 2, 33)
  local ttl, wanted = ARGV[at + 2] * 1000, tonumber(ARGV[at + 3])
  local queue, queue_ttl, sent = match(ARGV[at + 4], '^(%d)\t(%d+)\t(%d+)$')
  local state = load(key, now, owner, instead_of)
  if instead_of then
    remove(state, instead_of, lease_of(state, instead_of))
  end

  local function finish(reply)
    save(state)
    tell(state, owner)
    return reply
  end

  local held = lease_of(state, owner)
  if held then
    prolong(state, held, now + ttl)
    return finish({ 'g', held.first, held.tokens })
  end

  local waiter = waiter_of(state, owner)
  if waiter and not is_alive(state, waiter) then
    remove_waiter(state, waiter)
    waiter = nil
  end
  if waiter then
    waiter.asked, waiter.queue_ttl, waiter.sent = now, tonumber(queue_ttl), sent
    set_waiter(state, waiter)
  end
  settle(state)

  -- Settling may just have given it to this very claim: then this reply says so,
  -- with a whole ttl, and no notice is needed.
  if waiter then
    held = lease_of(state, owner)
    if held then
      prolong(state, held, now + ttl)
      return finish({ 'g', held.first, held.tokens })
    end
  end

  local mode, count, capacity = match(ARGV[at], '\t(%a)\t(%d+)\t(%d+)$', 34)
  local channel, info = match(ARGV[at + 1], '^\t([^\t]*)\t(.*)$')
  count, capacity = tonumber(count), tonumber(capacity)
  if state.waiters == 0 and fits(state, mode, count, capacity) then
    local first, tokens = 0, 0
    if wanted > 0 then
      first, tokens = mint(state.last, now, wanted)
      state.last = first + tokens - 1
    end
    add_holder(state, {
      owner = owner, expires = now + ttl, parked = false, mode = mode, count = count,
      capacity = text(capacity), first = first, tokens = tokens, since = text(now),
      channel = channel, info = info,
    })
    return finish({ 'g', first, tokens })
  end

  if queue ~= '1' then
    return finish({ 'b', somebody(state) })
  end
  if not waiter then
    add_waiter(state, {
      owner = owner, asked = now, queue_ttl = tonumber(queue_ttl), since = text(now),
      tokens = wanted, sent = sent, mode = mode, count = count, capacity = capacity,
      channel = channel, info = info,
    })
  end
  local free_in = state.holders > 0 and math.max(0, state.soonest - now) or -1
  return finish({ 'q', somebody(state), free_in })
end

function second.i(key, at)
  return second.a(key, at, sub(ARGV[at + 5], 2))
end

function second.r(key, at)
  local terms = terms_of[at] or at
  local owner, mode = sub(ARGV[at], 2, 33), sub(ARGV[terms], 35, 35)
  local state = load(key, now, owner)
  local held = lease_of(state, owner)
  if not held then
    conclude(state)
    return 0
  end
  if held.mode == 'x' and mode ~= 'x' then -- an old renewal must not turn it back
    held.mode, state.exclusive = mode, state.exclusive - 1
  end
  prolong(state, held, now + ARGV[terms + 1] * 1000)
  settle(state)
  local reply, wanted = state.waiters > 0 and 2 or 1, tonumber(ARGV[terms + 2])
  if reply == 1 and wanted > 0 and held.mode == 'x' then
    held.first, held.tokens = mint(state.last, now, wanted)
    state.last = held.first + held.tokens - 1
    set_holder(state, held)
    reply = granted(held.first, held.tokens, wanted)
  end
  save(state)
  tell(state)
  return reply
end

second.t = second.r

function second.x(key, at, stays)
  local owner = sub(ARGV[at], 2)
  local state = load(key, now, owner)
  local held, record = lease_of(state, owner)
  if held and stays then
    held.parked = '1'
    prolong(state, held, now + stays)
  else
    remove(state, owner, held)
  end
  conclude(state)
  return record and 1 or 0
end

function second.p(key, at)
  return second.x(key, at, tonumber(ARGV[at + 1]))
end

make(#rest, function(i)
  local call_number, letter, from = unpack(rest[i])
  made = call_number
  replies[made] = second[letter](KEYS[made], from)
end)
return replies
