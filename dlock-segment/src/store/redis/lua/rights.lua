-- Who opens an inventory must have the rights for everything that a batch may do: a script
-- that is refused half way leaves what it wrote. Redis can tell since version 7.

local function missing_right(is_ring)
  local calls = {
    { 'GETRANGE', '', 0, 0 }, { 'SETRANGE', '', 0, '' }, { 'BITFIELD', '' }, { 'SET', '', '' },
    { 'HMGET', 'h', 'f' }, { 'HSET', 'h', 'f', 'v' }, { 'HDEL', 'h', 'f' },
    { 'ZADD', 'x', 0, 'm' }, { 'ZREM', 'x', 'm' }, { 'ZRANGE', 'x', 0, 0 },
    { 'ZRANGEBYSCORE', 'x', 0, 0 }, { 'PEXPIREAT', 'o', 0 }, { 'LRANGE', 'z', 0, 0 },
    { 'RPUSH', 'z', 0 }, { 'XADD', 'j', '*', 'f', 'v' },
  }
  if is_ring then
    calls[#calls + 1] = { 'COPY', 'e', key .. 'o0' }
  end
  for _, call in ipairs(calls) do
    call[2] = key .. call[2]
    if redis.acl_check_cmd and not redis.acl_check_cmd(unpack(call)) then
      return redis.error_reply('NOPERM ' .. call[1])
    end
  end
end
