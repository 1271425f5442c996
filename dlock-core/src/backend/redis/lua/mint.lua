-- A whole number below 2^53 in digits. Cheaper than '%.0f', and '%d' alone would
-- not do where a long has 32 bits.
local function text(number)
  if number < 1000000 then
    return string.format('%d', number)
  end
  local millions = math.floor(number / 1000000)
  return string.format('%d%06d', millions, number - millions * 1000000)
end

-- New tokens for a key; how many is given as text.
--
-- The counter lasts for a second and then starts at the clock again, so that it
-- needs no cleaning and does not repeat when the data is lost. So it must stay
-- behind the clock: a range is cut to what the clock allows. One token is always
-- given; no server grants a key a million times a second.
local function mint(counter, now, wanted)
  local last, count = redis.call('INCRBY', counter, wanted), tonumber(wanted)
  if last == count then -- it was missing
    last = now + count
    redis.call('SET', counter, text(last), 'PX', '1000')
  elseif last > now and count > 1 then
    local ahead = math.min(last - now, count - 1)
    last = redis.call('DECRBY', counter, text(ahead))
    count = count - ahead
  end
  return last - count + 1, count
end

