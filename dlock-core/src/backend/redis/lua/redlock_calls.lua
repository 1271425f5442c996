-- calls: what one client asks one node of a quorum, together.
--
-- KEYS[1]  the marker of the node    KEYS[i + 1]  the key of the i-th call
-- ARGV[1]  one letter for each call  ARGV[2]  the silence of a node that has lost its data,
-- microseconds  ARGV[3]  the longest ttl, milliseconds. The arguments of the calls follow:
--   'a'  votes for a try:  1 mark  2 ttl, microseconds  3 first token  4 last token, both
--        with sixteen digits
--        5 the holder as JSON  6 for how many microseconds it waits if the key is taken, or
--        0  7 its channel  8 the owner whose lease is given up first, or ''
--   's'  the same on the terms (all but the mark) of the last 'a' before it:  1 mark
--   'r'  prolongs a lease:  1 mark  2 ttl  3 first token  4 last token  5 the holder
--        6 first further token, or 0  7 last further token  8 1 to take the lease again
--        where it is missing, else 0
--   'u'  takes back the votes for this try and earlier ones:  1 mark
--   'x'  the same, and the place among those who wait; the first of them is told:  1 mark
-- Replies 1 if that is the answer to all, else one element for each: 1 yes, 2 yes and others
-- wait, 3 yes with the further tokens, 0 there was nothing; or { 'b', the next token,
-- microseconds until the lease ends, its mark, its holder }, { 'y', next token }: given up,
-- since others wait, { 'l', next token, clock }, { 'h', clock }: the tokens are too low, or too
-- far ahead of the clock, or { 'z', microseconds until the node votes }.
--
-- What redlock_first.lua has left is in `rest`: number, letter, first argument and terms of
-- each.

local _, since = marker(KEYS[1], nil, ARGV[3])
local votes_from = since + tonumber(ARGV[2])
-- For how many microseconds it is known of a free key that somebody waits for it.
local REMEMBERED = 3000000

-- Writes the state, or removes it when nothing of it counts any more. What is there was
-- deleted or prolonged before if it takes memory.
local function save(state)
  local lasts = math.max(state.ends, state.register + SLACK) - now
  if state.waits == '1' then
    lasts = math.max(lasts, REMEMBERED)
  end
  if lasts <= 0 then
    call('DEL', state.key)
    return
  end
  call('SET', state.key, digits(state.register) .. state.waits .. digits(state.ends) .. state.mark
    .. state.first .. state.since .. state.info, 'PX', math.ceil(lasts / 1000) + 1)
end

-- Ends the lease. Freed before anything is written: a server that is out of memory lets a
-- script write only then.
local function free(state)
  call('DEL', state.key)
  state.ends, state.mark, state.info = 0, string.rep('0', 48), ''
end

local function lease(state, mark, ttl, first, info)
  if owner_of(state.mark) ~= owner_of(mark) or not state.there then
    state.since = digits(now)
  end
  state.mark, state.ends, state.first, state.info = mark, now + ttl, digits(first), info
end

-- Tells the first who waits. Who does not hear it is gone, and the next is told.
local function wake(state)
  for i, waiter in ipairs(waiters(state, '')) do
    local heard = redis.pcall('PUBLISH', waiter.channel,
      't\t' .. waiter.owner .. '\t' .. state.key .. '\t')
    if i == MOST_TOLD or type(heard) ~= 'number' or heard > 0 then
      return
    end
    call('HDEL', state.key .. 'w', waiter.owner)
  end
end

-- Remembers that somebody waits.
local function wait(state, at, terms)
  local queue_ttl = tonumber(ARGV[terms + 5])
  if queue_ttl == 0 then
    return
  end
  local key, owner = state.key .. 'w', owner_of(ARGV[at])
  local known = state.waits == '1' and call('HGET', key, owner)
  local place = known and match(known, '^%d+\t(%d+)\t') or format('%.0f', now)
  call('HSET', key, owner, format('%.0f', now + queue_ttl) .. '\t' .. place .. '\t'
    .. ARGV[terms + 6] .. '\t' .. ARGV[terms + 4])
  local lasts = math.ceil(queue_ttl / 1000) + 1
  if call('PTTL', key) < lasts then
    call('PEXPIRE', key, lasts)
  end
  if state.waits == '0' and state.there then
    call('SETRANGE', state.key, 16, '1')
  end
  state.waits = '1'
end

local function taken(state, at, terms)
  wait(state, at, terms)
  return { 'b', register(state) + 1, state.ends - now, state.mark, state.info }
end

local function votes_for(state, first, last)
  if first <= register(state) then
    return { 'l', register(state) + 1, now }
  end
  if last > now + LEAD then
    return { 'h', now }
  end
end

local calls = {}

function calls.a(key, at, terms)
  local state, mark = load(key), ARGV[at]
  local owner, instead_of = owner_of(mark), ARGV[terms + 7]
  local yields = false
  if is_held(state) then
    local held_by = owner_of(state.mark)
    if state.mark == mark then -- the same request once more
      return 1
    elseif held_by == owner and state.mark < mark then
      free(state)
    elseif held_by == instead_of then
      free(state)
      yields = #waiters(state, owner) > 0
    else
      return taken(state, at, terms)
    end
  elseif state.there then
    call('DEL', key)
  end
  local refused
  if yields then
    refused = { 'y', register(state) + 1 }
  elseif now < votes_from then
    refused = { 'z', votes_from - now }
  else
    refused = votes_for(state, tonumber(ARGV[terms + 2]), tonumber(ARGV[terms + 3]))
  end
  if refused then
    if state.there then
      save(state)
    end
    if yields then
      wake(state)
      state.there = true
      wait(state, at, terms)
    end
    return refused
  end
  state.register = tonumber(ARGV[terms + 3])
  lease(state, mark, tonumber(ARGV[terms + 1]), tonumber(ARGV[terms + 2]), ARGV[terms + 4])
  local others = false
  if state.waits == '1' then
    call('HDEL', key .. 'w', owner)
    others = #waiters(state, owner) > 0
    state.waits = others and '1' or '0'
  end
  save(state)
  return others and 2 or 1
end

calls.s = calls.a

function calls.r(key, at)
  local state, mark = load(key), ARGV[at]
  local first, last = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  if is_held(state) then
    if state.mark ~= mark then
      return { 'b', register(state) + 1, state.ends - now, state.mark, state.info }
    end
    call('PEXPIRE', key, 3600000) -- first, for a server that is out of memory
    first = tonumber(state.first)
  elseif ARGV[at + 7] == '0' then
    return 0
  elseif now < votes_from then -- it may have forgotten a vote for somebody else
    return { 'z', votes_from - now }
  elseif state.register > last then
    return { 'l', register(state) + 1, now }
  end
  local others = #waiters(state, owner_of(mark)) > 0
  local further, further_last = tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local extends = further > 0 and not others and not votes_for(state, further, further_last)
  if extends then
    first, last = further, further_last
  end
  state.register = math.max(state.register, last)
  lease(state, mark, tonumber(ARGV[at + 1]), first, ARGV[at + 4])
  save(state)
  return extends and 3 or others and 2 or 1
end

local function take_back(key, at)
  local state, mark = load(key), ARGV[at]
  local had = is_held(state) and owner_of(state.mark) == owner_of(mark) and state.mark <= mark
  if had then
    free(state)
    save(state)
  end
  return had, state
end

function calls.u(key, at)
  return take_back(key, at) and 1 or 0
end

function calls.x(key, at)
  local had, state = take_back(key, at)
  if state.waits == '1' or not state.there then
    call('HDEL', key .. 'w', owner_of(ARGV[at]))
  end
  if had then
    wake(state)
  end
  return had and 1 or 0
end

for _, left in ipairs(rest) do
  local done, reply = pcall(calls[left[2]], KEYS[left[1] + 1], left[3], left[4])
  if not done then
    reply = type(reply) == 'table' and reply or redis.error_reply('ERR ' .. tostring(reply))
  end
  replies[left[1]] = reply
end
return replies
