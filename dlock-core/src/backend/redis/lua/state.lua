-- What the scripts share: the state of a key and how it is settled. It must do what
-- backend/memory/lock_table.rs does; read the rules there.
--
-- Layout 2. A lock is one key, `dlock:2:{namespace:key}:l`, a semaphore another one
-- that ends in `p`, so each moves between servers in one piece. It is
--
--   missing               nobody holds it and nobody waits
--   a string '1' ...      one holder, not parked, and nobody waits: '1', owner (32
--                         characters), last token (16 digits), tab, record without
--                         its end, which is when the key expires
--   a string 't' ...      free; 32 zeros, and the last token until the clock passes it
--   a hash                any holders and waiters:
--       m           counts and bounds, packed (see META)
--       h<owner>    a holder: expires, parked, terms, first token, tokens, since,
--                   channel, JSON
--       w<owner>    a waiter: asked, queue_ttl, place, since, tokens, sent, terms,
--                   channel, JSON
--       q<place>    the owner that waits in this place; places rise, and may be empty
--
-- A holder is parked when its lease is over, but the key stays taken: 1 after a release,
-- 2 after a break, so that the holder hears of it before somebody else is let in; else 0.
-- Fields are separated by tabs, times are in microseconds. The terms are mode (x, s or
-- p), permits and capacity.
--
-- In a cluster (`always_hash`) it is never a string: while a slot moves, a script that
-- has deleted a key may not write it again, so a string could not become a hash. A key
-- that is free is then a hash with the counts alone, until the clock passes the last
-- token.
--
-- No call costs more when there are more holders or waiters: each has a field, and
-- the counts are kept beside them. `soonest` is never later than the first end of a
-- holder. Only when it has passed, the holders are looked through for those that
-- ended, some at a time (see expire). Dead waiters are dropped when they are first, or
-- when a new waiter finds them by chance.

-- The most fields that one call looks through for holders that ended.
local SWEEP = 128
-- The most places that one call passes over to find the first waiter.
local PLACES = 256
-- The most waiters that one call gives the key to; each of them asks again, and then
-- gives it to the next.
local GRANTS = 32
-- The most fields that are removed at once.
local DROPPED = 128

local META = {
  'holders', 'exclusive', 'permits', 'last', 'soonest', 'until_', 'head', 'tail',
  'waiters', 'cursor', 'swept', 'known',
}

local function parse_holder(owner, record)
  local expires, parked, mode, count, capacity, first, tokens, since, channel, info =
    match(record, '^(%d+)\t(%d)\t(%a)\t(%d+)\t(%d+)\t(%d+)\t(%d+)\t(%d+)\t([^\t]*)\t(.*)$')
  if not expires then
    error('DLOCKLAYOUT')
  end
  return {
    owner = owner, expires = tonumber(expires), parked = parked ~= '0' and parked, mode = mode,
    count = tonumber(count), capacity = capacity, first = tonumber(first),
    tokens = tonumber(tokens), since = since, channel = channel, info = info,
  }
end

local function write_holder(held)
  return text(held.expires) .. '\t' .. (held.parked or '0') .. '\t' .. held.mode .. '\t'
    .. text(held.count) .. '\t' .. held.capacity .. '\t' .. text(held.first) .. '\t'
    .. text(held.tokens) .. '\t' .. held.since .. '\t' .. held.channel .. '\t' .. held.info
end

local function parse_waiter(owner, record)
  local asked, queue_ttl, place, since, tokens, sent, mode, count, capacity, channel, info =
    match(record, '^(%d+)\t(%d+)\t(%d+)\t(%d+)\t(%d+)\t(%d+)\t(%a)\t(%d+)\t(%d+)\t([^\t]*)\t(.*)$')
  if not asked then
    error('DLOCKLAYOUT')
  end
  return {
    owner = owner, asked = tonumber(asked), queue_ttl = tonumber(queue_ttl), place = place,
    since = since, tokens = tonumber(tokens), sent = sent, mode = mode,
    count = tonumber(count), capacity = tonumber(capacity), channel = channel, info = info,
  }
end

local function write_waiter(waiter)
  return text(waiter.asked) .. '\t' .. text(waiter.queue_ttl) .. '\t' .. waiter.place .. '\t'
    .. waiter.since .. '\t' .. text(waiter.tokens) .. '\t' .. waiter.sent .. '\t' .. waiter.mode
    .. '\t' .. text(waiter.count) .. '\t' .. text(waiter.capacity) .. '\t' .. waiter.channel
    .. '\t' .. waiter.info
end

local function empty(key, now)
  return {
    key = key, now = now, notices = {}, fields = {}, written = {}, dropped = {}, holders = 0,
    exclusive = 0, permits = 0, last = 0, soonest = 0, until_ = 0, head = 1, tail = 1,
    waiters = 0, cursor = '', swept = 0, known = '',
  }
end

-- The state of a key; the fields of `owner` are read along with it, and the lease of `other`.
local function load(key, now, owner, other)
  local state = empty(key, now)
  local lease = 'h' .. (other or owner)
  local found = redis.pcall('HMGET', key, 'm', 'h' .. owner, 'w' .. owner, lease)
  if found.err then -- a string, then
    found = call('GET', key)
    local form = sub(found, 1, 1)
    if form ~= '1' and form ~= 't' then
      error('DLOCKLAYOUT')
    end
    state.form = form
    state.last = tonumber(sub(found, 34, 49))
    if form == '1' then
      local held = parse_holder(sub(found, 2, 33), sub(found, 51))
      -- Part of a millisecond may be left when none is.
      held.expires = now + (call('PTTL', key) + 1) * 1000
      state.lone, state.known = held, held.owner
      state.holders, state.soonest, state.until_ = 1, held.expires, held.expires
      state.exclusive = held.mode == 'x' and 1 or 0
      state.permits = held.count
    end
  elseif found[1] then
    local values = { cmsgpack.unpack(found[1]) }
    if #values ~= #META then
      error('DLOCKLAYOUT')
    end
    for i, name in ipairs(META) do
      state[name] = values[i]
    end
    state.form = 'hash'
    local fields = state.fields
    fields['h' .. owner], fields['w' .. owner], fields[lease] = found[2], found[3], found[4]
  end
  return state
end

-- A field of the hash, as this call has left it.
local function get(state, field)
  local value = state.fields[field]
  if value == nil and state.form == 'hash' then
    value = call('HGET', state.key, field)
  end
  return value
end

-- Written when the state is saved.
local function put(state, field, value)
  if not state.written[field] then
    state.written[#state.written + 1] = field
    state.written[field] = true
  end
  state.fields[field] = value
  state.changed = true
end

local function remove_dropped(state)
  if #state.dropped > 0 then
    call('HDEL', state.key, unpack(state.dropped))
    state.dropped = {}
  end
end

-- Removed when the state is saved, or when there are many.
local function drop(state, field)
  state.dropped[#state.dropped + 1] = field
  state.fields[field] = false
  state.changed = true
  if #state.dropped == DROPPED then
    remove_dropped(state)
  end
end

-- Makes a hash of it before something is written.
local function open(state)
  if state.form == 'hash' then
    return
  end
  if state.form then
    call('DEL', state.key)
  end
  state.form, state.fresh, state.prolonged = 'hash', true, true
  if state.lone then
    put(state, 'h' .. state.lone.owner, write_holder(state.lone))
    state.lone = nil
  end
end

-- How many milliseconds the key is kept.
local function lasts(state)
  return math.ceil((state.until_ - state.now) / 1000) + 1
end

-- The key is kept at least until then.
local function keep_until(state, moment)
  if moment > state.until_ then
    state.until_, state.prolonged = moment, true
  end
end

-- The counts and bounds, as they are kept.
local function packed(state)
  local values = {}
  for i, name in ipairs(META) do
    values[i] = state[name]
  end
  return cmsgpack.pack(unpack(values))
end

local function save(state)
  if not state.changed then
    return
  end
  local key, ahead = state.key, state.last - state.now
  local free = state.holders == 0 and state.waiters == 0
  -- First: a server that is out of memory lets a script write only after it has freed
  -- something.
  if free and (not always_hash or ahead < 0) then
    call('DEL', key)
  else
    remove_dropped(state)
  end
  if free then
    if always_hash and ahead >= 0 then
      state.until_ = state.last
      call('HSET', key, 'm', packed(state))
      call('PEXPIRE', key, math.floor(ahead / 1000) + 1)
    elseif ahead >= 0 then
      call('SET', key, 't' .. string.rep('0', 32) .. text16(state.last), 'PX',
        math.floor(ahead / 1000) + 1)
    end
    return
  end
  local fields = { 'm', packed(state) }
  for _, field in ipairs(state.written) do
    if state.fields[field] then
      fields[#fields + 1] = field
      fields[#fields + 1] = state.fields[field]
    end
  end
  call('HSET', key, unpack(fields))
  if state.prolonged then
    call('PEXPIRE', key, lasts(state))
  end
end

local function set_holder(state, held)
  open(state)
  put(state, 'h' .. held.owner, write_holder(held))
  keep_until(state, held.expires)
end

local function count_holder(state, held, by)
  state.holders = state.holders + by
  state.permits = state.permits + by * held.count
  if held.mode == 'x' then
    state.exclusive = state.exclusive + by
  end
end

local function bound(state, expires)
  if state.soonest == 0 or expires < state.soonest then
    state.soonest = expires
  end
  if state.cursor ~= '' and (state.swept == 0 or expires < state.swept) then
    state.swept = expires
  end
end

local function add_holder(state, held)
  local field = 'h' .. held.owner
  local parked = state.holders > 0 and get(state, field)
  if parked then -- the same owner asks again after it has parked a lease
    put(state, field .. '~' .. text(state.tail) .. '~' .. text(state.now), parked)
  end
  set_holder(state, held)
  count_holder(state, held, 1)
  bound(state, held.expires)
  state.known = held.owner
end

local function remove_holder(state, held)
  open(state)
  drop(state, 'h' .. held.owner)
  count_holder(state, held, -1)
  if state.known == held.owner then
    state.known = ''
  end
  if state.holders == 0 then
    state.soonest, state.cursor = 0, ''
  end
end

-- The lease of this owner, if there is one, and its holder: what it has parked is no
-- longer its lease.
local function lease_of(state, owner)
  local held = state.lone
  if held then
    held = held.owner == owner and held
  else
    local record = state.holders > 0 and get(state, 'h' .. owner)
    held = record and parse_holder(owner, record)
  end
  if held and held.expires <= state.now then
    remove_holder(state, held)
    held = nil
  end
  return held and not held.parked and held or nil, held or nil
end

-- Another end of a lease. The key is prolonged first, since a server that is out of
-- memory lets a script write only after a command that takes none.
local function prolong(state, held, expires)
  open(state)
  held.expires = expires
  set_holder(state, held)
  bound(state, expires)
  if state.holders == 1 and state.waiters == 0 then
    state.until_ = expires
  end
  if state.fresh then
    state.prolonged = true -- there is no hash yet
  else
    call('PEXPIRE', state.key, lasts(state))
    state.prolonged = false
  end
end

-- Drops holders that ended, some at a time. Until it is through, `soonest` stays in
-- the past, so that the next call goes on.
local function expire(state)
  if state.form ~= 'hash' or state.holders == 0 or state.now < state.soonest then
    return
  end
  if state.holders == 1 and state.known ~= '' then
    local held = parse_holder(state.known, get(state, 'h' .. state.known))
    if held.expires > state.now then
      state.soonest, state.changed = held.expires, true
    else
      remove_holder(state, held)
    end
    return
  end
  if state.cursor == '' then
    state.cursor, state.swept = '0', 0
  end
  local found = call('HSCAN', state.key, state.cursor, 'COUNT', SWEEP)
  state.cursor, state.changed = found[1], true
  local fields = found[2]
  local function look(field, record)
    local expires = record and sub(field, 1, 1) == 'h' and tonumber(match(record, '^%d+'))
    if expires and expires <= state.now then
      remove_holder(state, parse_holder(sub(field, 2), record))
    elseif expires and (state.swept == 0 or expires < state.swept) then
      state.swept = expires
    end
  end
  -- What this call has changed is not in the store yet.
  for i = 1, #fields, 2 do
    if state.fields[fields[i]] == nil then
      look(fields[i], fields[i + 1])
    end
  end
  for field, record in pairs(state.fields) do
    look(field, record)
  end
  if state.cursor == '0' then
    state.cursor, state.soonest = '', state.swept
  end
end

local function fits(state, mode, count, capacity)
  if mode == 'x' then
    return state.holders == 0
  elseif mode == 's' then
    return state.exclusive == 0
  end
  return state.permits + count <= capacity
end

local function remove_waiter(state, waiter)
  drop(state, 'w' .. waiter.owner)
  drop(state, 'q' .. waiter.place)
  state.waiters = state.waiters - 1
end

local function waiter_of(state, owner)
  local record = state.waiters > 0 and get(state, 'w' .. owner)
  return record and parse_waiter(owner, record) or nil
end

local function is_alive(state, waiter)
  return state.now < waiter.asked + waiter.queue_ttl
end

local function set_waiter(state, waiter)
  put(state, 'w' .. waiter.owner, write_waiter(waiter))
  keep_until(state, waiter.asked + waiter.queue_ttl)
end

-- Looks at some waiters by chance and drops who is dead, also behind one that lives.
-- Each new waiter does so, so the dead do not outnumber the other fields.
local function trim(state)
  for _, field in ipairs(call('HRANDFIELD', state.key, '4')) do
    local waiter = sub(field, 1, 1) == 'w' and waiter_of(state, sub(field, 2))
    if waiter and not is_alive(state, waiter) then
      remove_waiter(state, waiter)
    end
  end
end

local function add_waiter(state, waiter)
  open(state)
  waiter.place = text(state.tail)
  set_waiter(state, waiter)
  put(state, 'q' .. waiter.place, waiter.owner)
  state.tail, state.waiters = state.tail + 1, state.waiters + 1
  if state.waiters > 8 and not state.fresh then
    trim(state)
  end
end

-- The first live waiter. Dead ones before it are dropped.
local function front(state)
  for _ = 1, PLACES do
    if state.waiters == 0 then
      state.head = state.tail
      return nil
    end
    local owner = get(state, 'q' .. text(state.head))
    local waiter = owner and waiter_of(state, owner)
    if waiter and is_alive(state, waiter) then
      return waiter
    end
    if waiter then
      remove_waiter(state, waiter)
    end
    state.head, state.changed = state.head + 1, true
  end
end

-- Hands the key to the waiters whose turn it is.
local function settle(state)
  expire(state)
  for _ = 1, GRANTS do
    local waiter = front(state)
    if not waiter or not fits(state, waiter.mode, waiter.count, waiter.capacity) then
      return
    end
    remove_waiter(state, waiter)
    state.head = state.head + 1
    local first, tokens = 0, 0
    if waiter.mode ~= 'p' then
      first, tokens = mint(state.last, state.now, waiter.tokens)
      state.last = first + tokens - 1
    end
    add_holder(state, {
      owner = waiter.owner, expires = waiter.asked + waiter.queue_ttl, parked = false,
      mode = waiter.mode, count = waiter.count, capacity = text(waiter.capacity), first = first,
      tokens = tokens, since = text(state.now), channel = waiter.channel, info = waiter.info,
    })
    state.notices[#state.notices + 1] = {
      owner = waiter.owner, channel = waiter.channel, granted = true,
      message = table.concat({ 'g', waiter.owner, state.key, text(first), text(tokens),
        waiter.sent }, '\t'),
    }
    if waiter.mode == 'x' then
      return -- nobody fits beside it
    end
  end
end

-- A notice that cannot be sent is a notice that got lost: the waiter asks again.
-- In a cluster PUBLISH costs every node something. So a waiter may listen to a channel of
-- the lock at this node, and others are told only if it does not (or this Redis is older
-- than 7).
local function tell(state, except)
  for _, notice in ipairs(state.notices) do
    if notice.owner ~= except then
      local heard = always_hash and notice.granted
        and redis.pcall('SPUBLISH', state.key .. ':' .. notice.channel, notice.message)
      if type(heard) ~= 'number' or heard == 0 then
        redis.pcall('PUBLISH', notice.channel, notice.message)
      end
    end
  end
end

-- The end of every change that lets others in.
local function conclude(state)
  settle(state)
  save(state)
  tell(state)
end

-- All live holders and waiters, for operators: this looks at every field.
local function holders_of(state)
  if state.lone then
    return { state.lone }, {}
  end
  local holders, waiters = {}, {}
  local found = state.form == 'hash' and call('HGETALL', state.key) or {}
  for i = 1, #found, 2 do
    local kind, owner, record = sub(found[i], 1, 1), sub(found[i], 2), found[i + 1]
    if kind == 'h' then
      local held = parse_holder(owner, record)
      holders[#holders + 1] = held.expires > state.now and held or nil
    elseif kind == 'w' then
      local waiter = parse_waiter(owner, record)
      waiters[#waiters + 1] = is_alive(state, waiter) and waiter or nil
    end
  end
  return holders, waiters
end
