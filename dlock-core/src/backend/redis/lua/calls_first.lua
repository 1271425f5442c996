-- calls: acquires, renewals and releases that were made at the same time.
--
-- KEYS[i]  the state of the i-th call's key (layout: see common.lua)
-- ARGV     for each call in turn its word, its owner, and more:
--   'a'  takes a key if it is free, else joins its queue:
--        2 mode: x, s or p      3 permits to take   4 permits in all
--        5 ttl, microseconds    6 1 to queue, or 0  7 owner that is given up first, or ''
--        8 how many tokens      9 patience in microseconds
--        10 when it was sent, by the asker's clock  11 the asker's channel
--        12 who asks, as JSON
--   'r'  prolongs a lease: 2 mode  3 permits taken  4 permits in all  5 ttl, microseconds
--   'x'  gives back a lease or a place in the queue:
--        2 '' to free it at once, or for how many microseconds it stays taken
--
-- Replies one element for each: for 'a' { 'g', first token, count },
-- { 'b', holder } or { 'q', holder, microseconds until the first lease in the way
-- ends }, where the holder is JSON or '' and the last is -1 if none is in the way;
-- for 'r' 'h' held, 'w' held and others wait, 'l' lost; for 'x' 'r' released or
-- 'l' lost before; or that call's error, which concerns no other call.
--
-- This part, before common.lua, is all that undisputed locks need: INCRBY and SET
-- to take one (and TIME once), GET and PEXPIRE to prolong it, GET and DEL to give
-- it back. A key that is missing has neither holders nor waiters; where its form
-- is '1' there is one holder and nobody waits. What answers nothing here is left
-- to the second part, which looks at the key anew.

local moment
local function clock()
  if not moment then
    local time = redis.call('TIME')
    moment = time[1] * 1000000 + time[2]
  end
  return moment
end

local first = {}

function first.a(key, at)
  local mode, instead_of = ARGV[at + 2], ARGV[at + 7]
  if tonumber(ARGV[at + 3]) > tonumber(ARGV[at + 4]) then
    return nil
  end
  if instead_of ~= '' then
    local found = redis.call('GET', key)
    if not found or string.sub(found, 1, 33) ~= '1' .. instead_of then
      return nil
    end
  end
  local token, count = 0, 0
  local counter = string.sub(key, 1, -2) .. 't'
  if mode ~= 'p' then
    token, count = mint(counter, clock(), tonumber(ARGV[at + 8]))
  end
  local record = string.format('1%s\t%s\t%s\t%s\t%.0f\t%.0f\t%.0f\t0\t0\t%s\t', ARGV[at + 1], mode,
    ARGV[at + 3], ARGV[at + 4], token, count, clock(), ARGV[at + 11]) .. ARGV[at + 12]
  local lasts = math.ceil(ARGV[at + 5] / 1000)
  if instead_of ~= '' then
    redis.call('SET', key, record, 'PX', lasts)
  elseif not redis.call('SET', key, record, 'NX', 'PX', lasts) then
    if count > 0 then
      redis.call('INCRBY', counter, -count) -- before anybody is given later ones
    end
    return nil
  end
  return { 'g', token, count }
end

function first.r(key, at)
  local found = redis.call('GET', key)
  if not found then
    return 'l'
  end
  local owner = ARGV[at + 1]
  if string.sub(found, 1, 1) == '1' and string.sub(found, 2, 33) ~= owner then
    return 'l'
  end
  local start = table.concat({ '1' .. owner, ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], '' }, '\t')
  if string.sub(found, 1, #start) ~= start then
    return nil
  end
  redis.call('PEXPIRE', key, math.ceil(ARGV[at + 5] / 1000))
  return 'h'
end

function first.x(key, at)
  local found = redis.call('GET', key)
  if not found then
    return 'l'
  end
  if string.sub(found, 1, 1) ~= '1' then
    return nil
  end
  if string.sub(found, 2, 33) ~= ARGV[at + 1] then
    return 'l'
  end
  if ARGV[at + 2] ~= '' then
    return nil
  end
  redis.call('DEL', key)
  return 'r'
end

local replies, rest = {}, {}

-- Whether the call was answered.
local function make(call, i, at)
  local done, reply = pcall(call, KEYS[i], at)
  if not done and type(reply) ~= 'table' then
    reply = redis.error_reply('ERR ' .. tostring(reply))
  end
  replies[i] = reply
  return reply ~= nil
end

local words = { a = 13, r = 6, x = 3 }
local at = 1
for i = 1, #KEYS do
  if not make(first[ARGV[at]], i, at) then
    rest[#rest + 1] = { i, at }
  end
  at = at + words[ARGV[at]]
end
if #rest == 0 then
  return replies
end
