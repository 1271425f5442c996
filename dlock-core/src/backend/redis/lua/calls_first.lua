-- calls: acquires, renewals and releases that were made at the same time.
--
-- KEYS[i]  the state of the i-th call's key (layout: see common.lua)
-- ARGV[1]  one letter for each call; what it says follows, call by call:
--   'a'  takes a key if it is free, else joins its queue:
--        1 head: the record up to the tokens  2 tail: what follows the times in it
--        3 ttl, milliseconds  4 how many tokens, 0 for permits
--        5 1 to queue or 0, patience in microseconds, and when it was sent by the
--          asker's clock, with tabs between
--   'i'  the same, but gives up a lease of the key first:  6 its mark
--   'r'  prolongs a lease:  1 head  2 ttl, milliseconds
--   'x'  gives back a lease or a place in the queue:  1 its mark
--   'p'  gives back a lease, but the key stays taken:
--        1 its mark  2 for how many microseconds
-- A mark is '1' and the owner, the start of a head.
--
-- Replies one element for each. For 'a' and 'i' the first token, if as many were
-- given as were asked for; or { 'g', first token, count }, { 'b', holder } or { 'q',
-- holder, microseconds until the first lease in the way ends }, where the holder is
-- JSON or '' and the last is -1 if none is in the way. For 'r' 1 held, 2 held and
-- others wait, 0 lost. For 'x' and 'p' 1 released, 0 lost before. Or that call's
-- error, which concerns no other call.
--
-- This part, before common.lua, is all that undisputed locks need: INCRBY and SET
-- to take one (and TIME once), GETRANGE and PEXPIRE to prolong it, GETRANGE and
-- DEL to give it back. A key that is missing has neither holders nor waiters;
-- where its form is '1' there is one holder and nobody waits. What answers nothing
-- here is left to the second part, which looks at the key anew.

local moment, stamp
local function clock()
  if not moment then
    local time = call('TIME')
    moment = time[1] * 1000000 + time[2]
    stamp = text(moment)
  end
  return moment
end

-- What a call with this mark may say of a key that starts like this: nothing yet,
-- if others may be involved.
local function lost(found, mark)
  if found == '' or (string.sub(found, 1, 1) == '1' and string.sub(found, 1, 33) ~= mark) then
    return 0
  end
end

local first = {}

function first.a(key, at, instead_of)
  local now, wanted, lasts = clock(), ARGV[at + 3], ARGV[at + 2]
  local token, count = 0, '0'
  if wanted ~= '0' then
    token, count = mint(key, now, wanted)
  end
  local record = ARGV[at] .. text(token) .. '\t' .. count .. '\t' .. stamp .. ARGV[at + 1]
  if instead_of then
    call('SET', key, record, 'PX', lasts)
  elseif not call('SET', key, record, 'NX', 'PX', lasts) then
    if wanted ~= '0' then
      call('DECRBY', key .. 't', count) -- before anybody is given later ones
    end
    return nil
  end
  return count == wanted and token or { 'g', token, tonumber(count) }
end

function first.i(key, at)
  if call('GETRANGE', key, '0', '32') == ARGV[at + 5] then
    return first.a(key, at, true)
  end
end

function first.r(key, at)
  local head = ARGV[at]
  local found = call('GETRANGE', key, '0', #head - 1)
  if found == head then
    call('PEXPIRE', key, ARGV[at + 1])
    return 1
  end
  return lost(found, string.sub(head, 1, 33))
end

function first.x(key, at)
  local found = call('GETRANGE', key, '0', '32')
  if found == ARGV[at] then
    call('DEL', key)
    return 1
  end
  return lost(found, ARGV[at])
end

function first.p(key, at)
  return lost(call('GETRANGE', key, '0', '32'), ARGV[at])
end

local replies = {}
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
      replies[made] = type(fault) == 'table' and fault or redis.error_reply('ERR ' .. tostring(fault))
    end
  until done
end

local words = { a = 5, i = 6, r = 2, x = 1, p = 2 }
local rest, at = {}, 2
make(#KEYS, function(i)
  local letter, from = string.sub(ARGV[1], i, i), at
  made, at = i, at + words[letter]
  local reply = first[letter](KEYS[i], from)
  replies[i] = reply
  if reply == nil then
    rest[#rest + 1] = { i, letter, from }
  end
end)
if #rest == 0 then
  return replies
end
