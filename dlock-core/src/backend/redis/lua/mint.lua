local call, format = redis.call, string.format

-- A whole number below 2^53 in digits: '%d' alone would not do where a long has 32
-- bits.
local function text(number)
  if number < 1000000 then
    return format('%d', number)
  end
  local millions = math.floor(number / 1000000)
  return format('%d%06d', millions, number - millions * 1000000)
end

-- New tokens for a key: the first one, and how many there are. How many are wanted
-- and how many there are is text.
--
-- The counter lasts for a second and then starts at the clock again, so that it
-- needs no cleaning and does not repeat when the data is lost. So it must stay
-- behind the clock: a range is cut to what the clock allows. One token is always
-- given; no server grants a key a million times a second.
local function mint(key, now, wanted)
  local counter = key .. 't'
  local last, count = call('INCRBY', counter, wanted), tonumber(wanted)
  if last == count then -- it was missing
    last = now + count
    call('SET', counter, text(last), 'PX', '1000')
  elseif last > now and count > 1 then
    local ahead = math.min(last - now, count - 1)
    last = call('DECRBY', counter, text(ahead))
    count = count - ahead
    wanted = text(count)
  end
  return last - count + 1, wanted
end

