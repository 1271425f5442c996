-- calls in the layout of Redisson: acquires, renewals and releases that were made together.
--
-- Three keys for each call:
--   the lock, a hash: one field, `<uuid>:<number>`, with its count; it expires when the
--        lease ends. A lock that is not there is free.
--   what dlock knows besides, a string: the last token (16 digits), the first token, since
--        when in microseconds, the field, and the holder as JSON, with tabs between. It lasts
--        as long as the lease, and longer if the clock has not passed the last token.
--   the clients of dlock that wait, a hash, by field: until when, since when, and who as JSON,
--        with tabs between. It is for people; nobody is handed a lock.
-- Redisson knows the first one only.
-- ARGV[1]  one letter for each call; its arguments follow, call by call:
--   'a'  takes the lock if it is free:  1 field  2 channel  3 ttl, milliseconds  4 how many
--        tokens  5 the holder as JSON  6 for how many microseconds it waits, or 0  7 the field whose lease is given
--        up first, or ''  8 how many of the channel's subscribers are this client
--   'r'  prolongs a lease:  1 field  2 channel  3 ttl
--   'x'  gives back a lease:  1 field  2 channel
-- The channel is told '0' when a lock is given back, as Redisson does.
--
-- Replies one element for each. For 'a' { 'g', first token, count }, or { 'b', holder } or
-- { 'q', holder, microseconds until it is worth asking again, -1 if that is not known }. For
-- 'r' 1 held, 0 lost. For 'x' 1 released, 0 already lost. An error is the reply of the call
-- that it came from.

local call, sub, format, match = redis.call, string.sub, string.format, string.match
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- How long somebody who gave the lock up lets others go first, in microseconds.
local OTHERS_FIRST = 3000

local function digits(number)
  local millions = math.floor(number / 1000000)
  return format('%010d%06d', millions, number - millions * 1000000)
end

-- What is known of a lease of dlock: last and first token, since when, field, holder.
local function record(key)
  local found = call('GET', key)
  if found then
    return match(found, '^(%d+)\t(%d+)\t(%d+)\t([^\t]*)\t(.*)$')
  end
end

-- Who has the lock, as JSON. A holder of Redisson is told by its field.
local function holder(lock, key)
  local _, _, _, field, info = record(key)
  if field and call('HEXISTS', lock, field) == 1 then
    return info
  end
  local fields = call('HKEYS', lock)
  return cjson.encode({ name = fields[1] or '', host = 'Redisson', pid = 0 })
end

-- Frees the lock before anything is written, and keeps the last token for as long as the
-- clock has not passed it. Tells how many heard of it.
local function free(lock, key, channel)
  call('DEL', lock, key)
  local heard = call('PUBLISH', channel, '0')
  return heard
end

local function keep(key, last)
  local ahead = last and last - now or -1
  if ahead >= 0 then
    call('SET', key, digits(last) .. '\t0\t0\t\t', 'PX', math.floor(ahead / 1000) + 1)
  end
end

-- Remembers that somebody waits.
local function wait(key, at)
  local known = call('HGET', key, ARGV[at])
  local since = known and match(known, '^%d+\t(%d+)') or digits(now)
  call('HSET', key, ARGV[at], digits(now + ARGV[at + 5]) .. '\t' .. since .. '\t' .. ARGV[at + 4])
  local lasts = math.ceil(ARGV[at + 5] / 1000) + 1
  if call('PTTL', key) < lasts then
    call('PEXPIRE', key, lasts)
  end
end

local function take(lock, key, waiters, at, last)
  local first = math.max(now, (last or 0) + 1)
  -- Tokens that are ahead of the clock come one by one, so that it catches up.
  local count = first > now and 1 or tonumber(ARGV[at + 3])
  call('HSET', lock, ARGV[at], '1')
  call('PEXPIRE', lock, ARGV[at + 2])
  call('SET', key, digits(first + count - 1) .. '\t' .. digits(first) .. '\t' .. digits(now)
    .. '\t' .. ARGV[at] .. '\t' .. ARGV[at + 4], 'PX', ARGV[at + 2])
  call('HDEL', waiters, ARGV[at])
  return { 'g', first, count }
end

local calls = {}

function calls.a(lock, key, waiters, at)
  local field, given_up = ARGV[at], ARGV[at + 6]
  local last, first, _, whose = record(key)
  last = tonumber(last)
  if call('HEXISTS', lock, field) == 1 then -- the same request once more: not a re-entry
    if whose ~= field then
      return take(lock, key, waiters, at, last)
    end
    call('PEXPIRE', lock, ARGV[at + 2])
    call('PEXPIRE', key, ARGV[at + 2])
    return { 'g', tonumber(first), last - tonumber(first) + 1 }
  end
  if given_up ~= '' and call('HEXISTS', lock, given_up) == 1 then
    if free(lock, key, ARGV[at + 1]) > tonumber(ARGV[at + 7]) then
      keep(key, last)
      wait(waiters, at)
      return { 'q', '', OTHERS_FIRST }
    end
  elseif call('EXISTS', lock) == 1 then
    if ARGV[at + 5] == '0' then
      return { 'b', holder(lock, key) }
    end
    wait(waiters, at)
    local left = call('PTTL', lock)
    return { 'q', holder(lock, key), left < 0 and -1 or left * 1000 }
  end
  return take(lock, key, waiters, at, last)
end

function calls.r(lock, key, _, at)
  if call('HEXISTS', lock, ARGV[at]) == 0 then
    return 0
  end
  call('PEXPIRE', lock, ARGV[at + 2])
  call('PEXPIRE', key, ARGV[at + 2])
  return 1
end

function calls.x(lock, key, waiters, at)
  if call('HEXISTS', lock, ARGV[at]) == 0 then
    call('HDEL', waiters, ARGV[at])
    return 0
  end
  local last = tonumber((record(key)))
  free(lock, key, ARGV[at + 1])
  keep(key, last)
  return 1
end

local arguments = { a = 8, r = 3, x = 2 }
local replies, at = {}, 2
for i = 1, #KEYS / 3 do
  local letter = sub(ARGV[1], i, i)
  local done, reply = pcall(calls[letter], KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i], at)
  if not done then
    reply = type(reply) == 'table' and reply or redis.error_reply('ERR ' .. tostring(reply))
  end
  replies[i] = reply
  at = at + arguments[letter]
end
return replies
