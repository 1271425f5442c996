-- New tokens for a key.
--
-- The counter lasts for a second and then starts at the clock again, so that it
-- needs no cleaning and does not repeat when the data is lost. So it must stay
-- behind the clock: a range is cut to what the clock allows. One token is always
-- given; no server grants a key a million times a second.
local function mint(counter, now, count)
  local last = redis.call('INCRBY', counter, count)
  if last == count then -- it was missing
    last = now + count
    redis.call('SET', counter, string.format('%.0f', last), 'PX', 1000)
  elseif last > now and count > 1 then
    local ahead = math.min(last - now, count - 1)
    last = redis.call('INCRBY', counter, string.format('%.0f', -ahead))
    count = count - ahead
  end
  return last - count + 1, count
end

