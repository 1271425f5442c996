-- renew: prolongs leases, each by its ttl.
--
-- KEYS[i]          the state of the i-th lease's key (layout: see common.lua)
-- ARGV[5 i - 4]    its owner
-- ARGV[5 i - 3 ..] its mode, permits taken, permits in all, ttl in microseconds
--
-- Replies one element for each: 'h' held, 'w' held and others wait, 'l' lost, or
-- that lease's error.
--
-- This part, before common.lua, is all that leases without rivals need: GET and
-- PEXPIRE each.

local replies, rest = {}, {}
for i = 1, #KEYS do
  local owner, mode, take, of = ARGV[5 * i - 4], ARGV[5 * i - 3], ARGV[5 * i - 2], ARGV[5 * i - 1]
  local found = redis.pcall('GET', KEYS[i])
  if not found then
    replies[i] = 'l'
  elseif type(found) == 'table' then
    replies[i] = found
  elseif string.sub(found, 1, 1) == '1' and string.sub(found, 2, 33) ~= owner then
    replies[i] = 'l'
  else
    local start = table.concat({ '1' .. owner, mode, take, of, '' }, '\t')
    if string.sub(found, 1, #start) == start then
      redis.call('PEXPIRE', KEYS[i], math.ceil(ARGV[5 * i] / 1000))
      replies[i] = 'h'
    else
      replies[i] = found
      rest[#rest + 1] = i
    end
  end
end
if #rest == 0 then
  return replies
end
