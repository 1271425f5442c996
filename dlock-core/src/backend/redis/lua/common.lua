-- What the scripts share: the state of a key and how it is settled. It must do
-- what backend/memory/queue.rs does; read the rules there.
--
-- Layout 1. For a lock, <key> is `dlock:1:{namespace:text}:l`, for a semaphore it
-- ends in `p`. All keys of a lock have one hash tag, so they are in one slot.
--   <key>   string, the holders:
--           '1' record                one holder, not parked, and nobody waits;
--                                     its lease ends when the key expires
--           'm' 0 \n record \n ...    any holders, nobody waits
--           'q' until \n record ...   any holders, and there are waiters, all of
--                                     them dead after `until`
--   <key>q  list of the waiting owners, first come first
--   <key>w  hash, owner -> waiter
--   <key>t  the last token of a lock; ...b  who broke the lock last
-- As long as anybody waits <key> is there, so a missing one means: free.
-- A record is owner, mode, take, of, first token, tokens, since, expires, parked,
-- channel, JSON; a waiter is mode, take, of, tokens, since, asked, patience,
-- sent, channel, JSON; separated by tabs, times in microseconds.

local RECORD = '^([^\t]+)' .. string.rep('\t([^\t]*)', 9) .. '\t(.*)$'
local WAITER = '^([^\t]+)' .. string.rep('\t([^\t]*)', 8) .. '\t(.*)$'

-- Owner, mode, permits to take and permits in all, from the head of a record.
local function parse_head(head)
  local owner, mode, take, of = string.match(head, '^1(%x+)\t(%a)\t(%d+)\t(%d+)\t$')
  return owner, mode, tonumber(take), tonumber(of)
end

-- The owner, from its mark.
local function owner_of(mark)
  return string.sub(mark, 2)
end

local function parse_record(record)
  local owner, mode, take, of, first, count, since, expires, parked, channel, info =
    string.match(record, RECORD)
  if not owner then
    error('DLOCKLAYOUT')
  end
  return {
    owner = owner, mode = mode, take = tonumber(take), of = tonumber(of),
    first = tonumber(first), count = tonumber(count), since = tonumber(since),
    expires = tonumber(expires), parked = parked == '1', channel = channel, info = info,
  }
end

local function write_record(held)
  return table.concat({
    held.owner, held.mode, text(held.take), text(held.of), text(held.first), text(held.count),
    text(held.since), text(held.expires), held.parked and '1' or '0', held.channel, held.info,
  }, '\t')
end

local function parse_waiter(owner, waiter)
  local mode, take, of, tokens, since, asked, patience, sent, channel, info =
    string.match(waiter, WAITER)
  if not mode then
    error('DLOCKLAYOUT')
  end
  return {
    owner = owner, mode = mode, take = tonumber(take), of = tonumber(of),
    tokens = tonumber(tokens), since = tonumber(since), asked = tonumber(asked),
    patience = tonumber(patience), sent = sent, channel = channel, info = info,
  }
end

local function write_waiter(waiter)
  return table.concat({
    waiter.mode, text(waiter.take), text(waiter.of), text(waiter.tokens), text(waiter.since),
    text(waiter.asked), text(waiter.patience), waiter.sent, waiter.channel, waiter.info,
  }, '\t')
end

-- The state of a key, without the holders that expired.
local function load(key, now)
  local found = redis.call('GET', key)
  local state = { key = key, now = now, holders = {}, queued = false, waits_until = 0, notices = {} }
  if not found then
    return state
  end
  state.found = true
  local form = string.sub(found, 1, 1)
  if form == '1' then
    local held = parse_record(string.sub(found, 2))
    held.expires = now + redis.call('PTTL', key) * 1000
    if held.expires > now then
      state.holders[1] = held
    end
    return state
  end
  local waits_until, records = string.match(found, '^[mq](%d+)\n(.*)$')
  if not waits_until then
    error('DLOCKLAYOUT')
  end
  state.waits_until = tonumber(waits_until)
  state.queued = form == 'q'
  for record in string.gmatch(records, '[^\n]+') do
    local held = parse_record(record)
    if held.expires > now then
      state.holders[#state.holders + 1] = held
    end
  end
  return state
end

local function save(state)
  local holders = state.holders
  if #holders == 0 and not state.queued then
    if state.found then
      redis.call('DEL', state.key)
    end
    return
  end
  local value, ends
  if #holders == 1 and not holders[1].parked and not state.queued then
    value, ends = '1' .. write_record(holders[1]), holders[1].expires
  else
    ends = state.queued and state.waits_until or 0
    local lines = { (state.queued and 'q' or 'm') .. text(ends) }
    for i, held in ipairs(holders) do
      lines[i + 1] = write_record(held)
      ends = math.max(ends, held.expires)
    end
    lines[#lines + 1] = ''
    value = table.concat(lines, '\n')
  end
  local lasts = math.max(1, math.ceil((ends - state.now) / 1000))
  local done = redis.pcall('SET', state.key, value, 'PX', lasts)
  if type(done) == 'table' and done.err then
    -- A server that is out of memory still lets a script write that freed
    -- something first, and what is given back must get through.
    redis.call('DEL', state.key)
    redis.call('SET', state.key, value, 'PX', lasts)
  end
end

-- What this owner holds; what it has parked is no longer its own.
local function held_by(state, owner)
  for place, held in ipairs(state.holders) do
    if held.owner == owner and not held.parked then
      return held, place
    end
  end
end

local function remove(state, owner)
  local held, place = held_by(state, owner)
  if held then
    table.remove(state.holders, place)
  elseif state.queued and redis.call('HDEL', state.key .. 'w', owner) == 1 then
    redis.call('LREM', state.key .. 'q', 1, owner)
  end
end

local function fits(state, mode, take, of)
  if mode == 'x' then
    return #state.holders == 0
  end
  local taken = 0
  for _, held in ipairs(state.holders) do
    if mode == 's' and held.mode ~= 's' then
      return false
    end
    taken = taken + held.take
  end
  return mode == 's' or taken + take <= of
end

-- The first live waiter. Dead ones before it are dropped, 64 at a time.
local function front(state)
  local last = 0
  while state.queued do
    local owners = redis.call('LRANGE', state.key .. 'q', 0, last)
    if #owners == 0 then
      state.queued = false
      return nil
    end
    local waiters = redis.call('HMGET', state.key .. 'w', unpack(owners))
    local dead, live = {}, nil
    for i, owner in ipairs(owners) do
      local waiter = waiters[i] and parse_waiter(owner, waiters[i])
      if waiter and state.now < waiter.asked + waiter.patience then
        live = waiter
        break
      end
      dead[i] = owner
    end
    if #dead > 0 then
      redis.call('LTRIM', state.key .. 'q', #dead, -1)
      redis.call('HDEL', state.key .. 'w', unpack(dead))
    end
    if live then
      return live
    end
    last = 63
  end
end

local function mint_for(state, mode, count)
  if mode == 'p' then
    return 0, 0
  end
  local first, given = mint(state.key, state.now, text(count))
  return first, tonumber(given)
end

-- Hands the key to the waiters whose turn it is.
local function settle(state)
  while true do
    local waiter = front(state)
    if not waiter or not fits(state, waiter.mode, waiter.take, waiter.of) then
      return
    end
    redis.call('LPOP', state.key .. 'q')
    redis.call('HDEL', state.key .. 'w', waiter.owner)
    local first, count = mint_for(state, waiter.mode, waiter.tokens)
    state.holders[#state.holders + 1] = {
      owner = waiter.owner, mode = waiter.mode, take = waiter.take, of = waiter.of,
      first = first, count = count, since = state.now,
      expires = waiter.asked + waiter.patience, parked = false,
      channel = waiter.channel, info = waiter.info,
    }
    state.notices[#state.notices + 1] = {
      owner = waiter.owner, channel = waiter.channel,
      message = table.concat({ 'g', waiter.owner, state.key, text(first), text(count),
        waiter.sent }, '\t'),
    }
  end
end

-- A notice that cannot be sent is a notice that got lost: the waiter asks again.
local function tell(state, except)
  for _, notice in ipairs(state.notices) do
    if notice.owner ~= except then
      redis.pcall('PUBLISH', notice.channel, notice.message)
    end
  end
end

-- The end of every change that lets others in.
local function conclude(state)
  settle(state)
  save(state)
  tell(state)
end
