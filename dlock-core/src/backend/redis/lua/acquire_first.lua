-- acquire: takes a key if it is free, else joins its queue.
--
-- KEYS[1]   the key's state (layout: see common.lua)
-- ARGV[1]   owner             ARGV[7]   owner that is given up first, or ''
-- ARGV[2]   mode: x, s or p   ARGV[8]   how many tokens
-- ARGV[3]   permits to take   ARGV[9]   patience in microseconds
-- ARGV[4]   permits in all    ARGV[10]  when it was sent, by the asker's clock
-- ARGV[5]   ttl, microseconds ARGV[11]  the asker's channel
-- ARGV[6]   1 to queue, or 0  ARGV[12]  who asks, as JSON
--
-- Replies { 'g', first token, count }, { 'b', holder }, or
-- { 'q', holder, microseconds until the first lease in the way ends }.
-- The holder is JSON or '', the last element is -1 if there is none in the way.
--
-- This part, before common.lua, is all that an undisputed lock needs: TIME,
-- INCRBY and SET. A key that is missing has neither holders nor waiters.

local key, owner, mode, instead_of = KEYS[1], ARGV[1], ARGV[2], ARGV[7]
local take, of, ttl = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local counter = string.sub(key, 1, -2) .. 't'

local function first_record(first, count)
  return string.format('1%s\t%s\t%s\t%s\t%.0f\t%.0f\t%.0f\t0\t0\t%s\t', owner, mode, ARGV[3],
    ARGV[4], first, count, now, ARGV[11]) .. ARGV[12]
end

local found
local spare = 0
local first, count = 0, 0
if instead_of == '' then
  if take <= of then
    if mode ~= 'p' then
      first, count = mint(counter, now, tonumber(ARGV[8]))
    end
    if redis.call('SET', key, first_record(first, count), 'NX', 'PX', math.ceil(ttl / 1000)) then
      return { 'g', first, count }
    end
    spare = count
  end
  found = redis.call('GET', key)
else
  found = redis.call('GET', key)
  if found and string.sub(found, 1, 33) == '1' .. instead_of and take <= of then
    if mode ~= 'p' then
      first, count = mint(counter, now, tonumber(ARGV[8]))
    end
    redis.call('SET', key, first_record(first, count), 'PX', math.ceil(ttl / 1000))
    return { 'g', first, count }
  end
end
