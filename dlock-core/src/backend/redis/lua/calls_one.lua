-- calls, the short way: one acquire of a lock that is free, one release of a lock that
-- nobody waits for, or renewals of such locks on the same terms. Most calls of most programs
-- are such. What is not done here is left to what follows, which would do the same (the
-- arguments are described there), but first builds what many calls share. The reply of a lone
-- call is a string or a number: a table around it would make such a call a tenth slower. An
-- error is in a table.

local renewed = 0 -- how many of the first calls were made here
local disputed -- a key that was seen not to be a string
if always_hash then -- it is never a string, and a run has one call
  if ARGV[1] == 'a' and ARGV[5] ~= '0' and redis.pcall('HGET', KEYS[1], 'm') == false then
    local time = redis.call('TIME')
    local stamp, now = time[1] .. string.format('%06d', time[2]), time[1] * 1000000 + time[2]
    local head, expires = ARGV[2], now + ARGV[4] * 1000
    local owner = string.sub(head, 2, 33)
    local counts = cmsgpack.pack(1, string.sub(head, 35, 35) == 'x' and 1 or 0, 0,
      now + ARGV[5] - 1, expires, expires, 1, 1, 0, '', 0, owner) -- see META
    local set = redis.pcall('HSET', KEYS[1], 'm', counts, 'h' .. owner,
      string.format('%d%06d', math.floor(expires / 1000000), expires % 1000000) .. '\t0'
      .. string.sub(head, 34) .. '\t' .. stamp .. '\t' .. ARGV[5] .. '\t' .. stamp .. ARGV[3])
    if type(set) == 'table' then
      return { set } -- out of memory
    end
    redis.call('PEXPIRE', KEYS[1], math.ceil((expires - now) / 1000) + 1)
    return stamp
  end
elseif ARGV[1] == 'a' and ARGV[5] ~= '0' then
  local time = redis.call('TIME')
  local seconds, micros = time[1], time[2]
  if #micros < 6 then
    micros = string.sub('00000' .. micros, -6)
  end
  local last = micros + ARGV[5] - 1 -- microseconds of the last token
  if last < 1000000 and #seconds == 10 then
    if last < 100000 then
      last = string.format('%06d', last)
    end
    local head, now = ARGV[2], seconds .. micros
    if redis.call('SET', KEYS[1], string.sub(head, 1, 33) .. seconds .. last .. '\t0\t0'
      .. string.sub(head, 34) .. '\t' .. now .. '\t' .. ARGV[5] .. '\t' .. now .. ARGV[3],
      'NX', 'PX', ARGV[4]) then
      return now
    end
  end
elseif ARGV[1] == 'x' then
  local found, mark = redis.pcall('GETRANGE', KEYS[1], '0', '48'), ARGV[2]
  if type(found) == 'string' and string.sub(found, 1, 33) == mark then
    local time = redis.call('TIME')
    local seconds, micros = time[1], time[2]
    if #micros < 6 then
      micros = string.sub('00000' .. micros, -6)
    end
    if found < mark .. seconds .. micros then -- the last token is over
      redis.call('DEL', KEYS[1])
      return 1
    end
  elseif type(found) ~= 'string' then
    disputed = KEYS[1]
  end
elseif ARGV[4] == '0' and string.find(ARGV[1], '^rt*$') then
  local head, ttl, find = ARGV[2], ARGV[3], string.find
  -- In the string of a lone holder, 16 digits and 4 more characters are between the two.
  local mark, conditions = string.sub(head, 1, 33), string.sub(head, 34)
  local prefix = string.format('%d', #head + 19)
  for i, key in ipairs(KEYS) do
    local found = redis.pcall('GETRANGE', key, '0', prefix)
    if type(found) ~= 'string' then
      disputed = key
      break
    elseif find(found, mark, 1, true) ~= 1 or find(found, conditions, 54, true) ~= 54
      or type(redis.pcall('PEXPIRE', key, ttl)) ~= 'number' then
      break
    end
    renewed, mark = i, ARGV[i + 4]
  end
  if renewed == #KEYS then
    return 1
  end
end
