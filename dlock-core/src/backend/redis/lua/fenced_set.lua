-- fenced_set: writes a value unless somebody newer wrote before.
--
-- KEYS[1]  the value                       KEYS[2]  its fence, a hash
-- ARGV[1]  x for a write under an exclusive lock, s under a shared one
-- ARGV[2]  the token                       ARGV[3]  the value
--
-- The fence has two registers: the newest token of each kind. An exclusive write
-- passes if it is not older than the last exclusive one and newer than every
-- shared one; a shared one passes if it is newer than the last exclusive one.
-- Replies 1 if it was written, 0 if it came too late.
--
-- Tokens are compared digit by digit: a number in Lua is exact to 2^53 only.
local function newer(one, other)
  if #one ~= #other then
    return #one > #other
  end
  return one > other
end

local token = string.match(ARGV[2], '^0*(%d+)$')
if not token then
  return redis.error_reply('ERR the token is not a whole number')
end
local registers = redis.call('HMGET', KEYS[2], 'x', 's')
local exclusive, shared = registers[1] or '0', registers[2] or '0'
local passes
if ARGV[1] == 'x' then
  passes = not newer(exclusive, token) and newer(token, shared)
elseif ARGV[1] == 's' then
  passes = newer(token, exclusive)
else
  return redis.error_reply('ERR a write is x (exclusive) or s (shared)')
end
if not passes then
  return 0
end
redis.call('SET', KEYS[1], ARGV[3])
if ARGV[1] == 'x' or newer(token, shared) then
  redis.call('HSET', KEYS[2], ARGV[1], token)
end
return 1
