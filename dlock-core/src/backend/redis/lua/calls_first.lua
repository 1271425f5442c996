-- calls: acquires, renewals and releases that were made at the same time.
--
-- KEYS[i]  the key of the i-th call (layout: see state.lua)
-- ARGV[1]  one letter for each call; its arguments follow, call by call:
--   'a'  takes a key if it is free, else joins its queue:
--        1 head: '1', the owner, and the terms  2 tail: channel and holder
--        3 ttl, milliseconds  4 how many tokens, 0 for permits
--        5 1 to queue or 0, queue_ttl in microseconds, and when it was sent by the
--          client's clock, with tabs between
--   'i'  the same, but gives up a lease of the key first:  6 its mark
--   'r'  prolongs a lease:  1 head  2 ttl, milliseconds  3 how many further tokens an
--        exclusive one is given if nobody waits, or 0
--   't'  the same on the terms (all but the mark) of the last 'r' before it:  1 its mark
--   'x'  gives back a lease or a place in the queue:  1 its mark
--   'p'  gives back a lease, but the key stays taken:
--        1 its mark  2 for how many microseconds
-- A mark is '1' and the owner. The terms are mode, permits and capacity, a tab before
-- each.
--
-- Replies one element for each. For 'a' and 'i' the first token (a number, or its
-- digits), if as many were
-- given as were asked for; or { 'g', first token, count }, { 'b', holder } or { 'q',
-- holder, microseconds until it is worth asking again }, where the holder is JSON or
-- '' and the last is -1 if nobody is in the way. For 'r' 1 held, 2 held and others
-- wait, 0 lost, or the further tokens as for 'a'. For 'x' and 'p' 1 released, 0 already
-- lost. An error is the reply of the call that it came from. If all replies are 1, which is
-- what renewals of many locks are answered, 1 alone is the reply; and so may be the digits of
-- a token, if there is one call.
--
-- This first part serves a key that has one holder at most and nobody waits for (not in
-- a cluster, see state.lua). It then is a string, and each call takes two or three commands.
-- What answers nothing here is left to the second part, which looks at the key anew; and so
-- is every later call on that key, so that calls on one key keep their order.

-- The string of a lone holder; the last token has sixteen digits, and how many tokens
-- it has and its first one are digits too.
local function lone_holder(at, last, first, count)
  local head = ARGV[at]
  return sub(head, 1, 33) .. last .. '\t0\t0' .. sub(head, 34) .. '\t' .. first .. '\t'
    .. count .. '\t' .. stamp .. ARGV[at + 1]
end

local NO_TOKEN = string.rep('0', 16)

local function granted(first, count, wanted)
  return count == wanted and first or { 'g', first, count }
end

local first = {}
local lasts = {} -- the digits of the last token, by how many are wanted

function first.a(key, at)
  local now, wanted = clock(), ARGV[at + 3]
  local value, token
  if wanted == '0' then
    token, value = 0, lone_holder(at, NO_TOKEN, '0', wanted)
  else
    local last = lasts[wanted]
    if not last then
      last = text16(now + wanted - 1)
      lasts[wanted] = last
    end
    token, value = now, lone_holder(at, last, stamp, wanted)
  end
  if call('SET', key, value, 'NX', 'PX', ARGV[at + 2]) then
    return token
  end
end

-- The mark of a key that is a string, and its last token.
local function lone(key)
  local found = redis.pcall('GETRANGE', key, '0', '48')
  if type(found) == 'string' then
    return sub(found, 1, 33), sub(found, 34, 49)
  end
end

function first.i(key, at)
  local mark, last = lone(key)
  if mark == ARGV[at + 5] then
    local now, wanted = clock(), tonumber(ARGV[at + 3])
    local token, count = 0, 0
    last = tonumber(last)
    if wanted > 0 then
      token, count = mint(last, now, wanted)
      last = token + count - 1
    end
    call('SET', key, lone_holder(at, text16(last), text(token), count), 'PX', ARGV[at + 2])
    return granted(token, count, wanted)
  end
end

-- What a call with this mark may say of a key that has another one, or none: nothing
-- yet, if others may be involved.
local function lost(found)
  local form = found and sub(found, 1, 1)
  if form == '' or form == '1' or form == 't' then
    return 0
  end
end

-- Where the arguments of the last 'r' start, and what is taken out of them.
local terms, conditions, prefix
local terms_of = {} -- the same for each 't' that is left to the second part

local function renew(key, mark)
  local found = redis.pcall('GETRANGE', key, '0', prefix)
  if type(found) ~= 'string' then
    return nil
  end
  if sub(found, 1, 33) ~= mark then
    return lost(found)
  end
  if sub(found, 54) ~= conditions then
    return nil
  end
  if ARGV[terms + 2] == '0' then
    call('PEXPIRE', key, ARGV[terms + 1])
    return 1
  end
  local wanted = tonumber(ARGV[terms + 2])
  local first, count = mint(tonumber(sub(found, 34, 49)), clock(), wanted)
  local since_and_tail = match(call('GET', key), '^\t%d+\t%d+(\t.*)$', #found + 1)
  call('SET', key, sub(found, 1, 33) .. text16(first + count - 1) .. sub(found, 50) .. '\t'
    .. text(first) .. '\t' .. text(count) .. since_and_tail, 'PX', ARGV[terms + 1])
  return granted(first, count, wanted)
end

function first.r(key, at)
  return renew(key, sub(ARGV[at], 1, 33))
end

function first.t(key, at)
  return renew(key, ARGV[at])
end

-- Leaves the last token behind until the clock has passed it.
local function give_up(key, last)
  local now = clock()
  if #stamp == 16 and last < stamp then -- as numbers, since both have sixteen digits
    call('DEL', key)
    return
  end
  local ahead = tonumber(last) - now
  if ahead < 0 then
    call('DEL', key)
  else
    call('SET', key, 't' .. string.rep('0', 32) .. last, 'PX', math.floor(ahead / 1000) + 1)
  end
end

function first.x(key, at)
  local found = redis.pcall('GETRANGE', key, '0', '48')
  if type(found) ~= 'string' then
    return nil
  end
  if find(found, ARGV[at], 1, true) == 1 then
    give_up(key, sub(found, 34))
    return 1
  end
  return lost(found)
end

function first.p(key, at)
  local mark = lone(key)
  if mark ~= ARGV[at] then
    return lost(mark)
  end
end

local replies, all_one = {}, true
local made -- the call that is being made

-- Makes calls one after the other. An error is the answer of the call it came from.
local function make(count, one)
  local i = 0
  local function on()
    while i < count do
      i = i + 1
      one(i)
    end
  end
  repeat
    local done, fault = pcall(on)
    if not done then
      all_one = false
      replies[made] = type(fault) == 'table' and fault or redis.error_reply('ERR ' .. tostring(fault))
    end
  until done
end

local arguments = { a = 5, i = 6, r = 3, t = 1, x = 1, p = 2 }
local rest, deferred, at = {}, { [disputed or ''] = true }, 2
make(#KEYS, function(i)
  local key, letter, from = KEYS[i], sub(ARGV[1], i, i), at
  made, at = i, at + arguments[letter]
  if letter == 'r' then
    local head = ARGV[from]
    terms, conditions, prefix = from, sub(head, 34), text(#head + 19)
  end
  local reply
  if i <= renewed then
    reply = 1
  elseif not always_hash and not deferred[key] then
    reply = first[letter](key, from)
  end
  if reply == nil then
    deferred[key] = true
    rest[#rest + 1] = { i, letter, from }
    if letter == 't' then
      terms_of[from] = terms
    end
  else
    replies[i] = reply
    all_one = all_one and reply == 1
  end
end)
if #rest == 0 then
  return all_one and 1 or replies
end
