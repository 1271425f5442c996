local call, format, sub = redis.call, string.format, string.sub
local match, find = string.match, string.find

-- A whole number below 2^53 in digits: '%d' alone would not do where a long has 32
-- bits.
local function text(number)
  if number < 1000000 then
    return format('%d', number)
  end
  local millions = math.floor(number / 1000000)
  return format('%d%06d', millions, number - millions * 1000000)
end

-- The same with sixteen digits, as many as 2^53 has.
local function text16(number)
  local millions = math.floor(number / 1000000)
  return format('%010d%06d', millions, number - millions * 1000000)
end

-- The server's time in microseconds, the same for the whole run, and its digits.
local moment, stamp
local function clock()
  if not moment then
    local time = call('TIME')
    moment = time[1] * 1000000 + time[2]
    stamp = text(moment)
  end
  return moment
end

-- New tokens after `last`, the last one that was given: the first one, and how many.
--
-- Tokens start at the clock, so that they rise also when the data is lost. So they
-- must not run far ahead of it: while they are ahead, a grant brings one token only.
-- No server grants a key a million times a second.
local function mint(last, now, wanted)
  if last < now then
    return now, wanted
  end
  return last + 1, 1
end
