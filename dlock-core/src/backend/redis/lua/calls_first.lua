-- calls: acquires, renewals and releases that were made at the same time.
--
-- KEYS[i]  the state of the i-th call's key (layout: see common.lua)
-- ARGV     for each call in turn its word and what it says:
--   'a'  takes a key if it is free, else joins its queue:
--        1 head: the record up to the tokens  2 tail: what follows the times in it
--        3 ttl, milliseconds  4 how many tokens, 0 for permits
--        5 owner that is given up first, or ''
--        6 1 to queue or 0, patience in microseconds, and when it was sent by the
--          asker's clock, with tabs between
--   'r'  prolongs a lease: 1 head  2 ttl, milliseconds
--   'x'  gives back a lease or a place in the queue:
--        1 owner  2 '' to free it at once, or for how many microseconds it stays taken
--
-- Replies one element for each. For 'a' the first token, if as many were given as
-- were asked for; or { 'g', first token, count }, { 'b', holder } or { 'q', holder,
-- microseconds until the first lease in the way ends }, where the holder is JSON
-- or '' and the last is -1 if none is in the way. For 'r' 1 held, 2 held and others
-- wait, 0 lost. For 'x' 1 released, 0 lost before. Or that call's error, which
-- concerns no other call.
--
-- This part, before common.lua, is all that undisputed locks need: INCRBY and SET
-- to take one (and TIME once), GETRANGE and PEXPIRE to prolong it, GETRANGE and
-- DEL to give it back. A key that is missing has neither holders nor waiters;
-- where its form is '1' there is one holder and nobody waits. What answers nothing
-- here is left to the second part, which looks at the key anew.

local moment, stamp
local function clock()
  if not moment then
    local time = redis.call('TIME')
    moment = time[1] * 1000000 + time[2]
    stamp = text(moment)
  end
  return moment
end

local first = {}

function first.a(key, at)
  local head, tail, lasts, instead_of = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 5]
  if instead_of ~= '' and redis.call('GETRANGE', key, '0', '32') ~= '1' .. instead_of then
    return nil
  end
  local wanted, token, count = ARGV[at + 4], 0, 0
  local now, counter = clock(), nil
  if wanted ~= '0' then
    counter = string.sub(key, 1, -2) .. 't'
    token, count = mint(counter, now, wanted)
  end
  local record = table.concat({ head, text(token), '\t', count, '\t', stamp, tail })
  if instead_of ~= '' then
    redis.call('SET', key, record, 'PX', lasts)
  elseif not redis.call('SET', key, record, 'NX', 'PX', lasts) then
    if counter then
      redis.call('DECRBY', counter, text(count)) -- before anybody is given later ones
    end
    return nil
  end
  return tostring(count) == wanted and token or { 'g', token, count }
end

function first.r(key, at)
  local head = ARGV[at + 1]
  local found = redis.call('GETRANGE', key, '0', text(#head - 1))
  if found == head then
    redis.call('PEXPIRE', key, ARGV[at + 2])
    return 1
  end
  if found == '' or (string.sub(found, 1, 1) == '1' and string.sub(found, 1, 33) ~= string.sub(head, 1, 33)) then
    return 0
  end
end

function first.x(key, at)
  local found = redis.call('GETRANGE', key, '0', '32')
  if found == '1' .. ARGV[at + 1] then
    if ARGV[at + 2] ~= '' then
      return nil
    end
    redis.call('DEL', key)
    return 1
  end
  if found == '' or string.sub(found, 1, 1) == '1' then
    return 0
  end
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

local words = { a = 7, r = 3, x = 3 }
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
