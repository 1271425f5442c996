-- calls, the short way of a hash: one release of the only holder, or one acquire in exchange for
-- the lease of the only holder. Nobody waits, or the first waiter wants a mutex and is handed it.
-- So a lock goes from one client to the next. What is not done here is left to what follows,
-- which would do the same, but takes four times as long.

local letter, key = ARGV[1], KEYS[1]
local mark, asker = false, ''
if letter == 'x' and (always_hash or disputed) then
  mark = ARGV[2]
elseif letter == 'i' and sub(ARGV[6], 1, 1) == '1' then
  mark, asker = ARGV[7], sub(ARGV[2], 2, 33)
end
local lease = mark and 'h' .. sub(mark, 2)
local found = mark and redis.pcall('HMGET', key, 'm', lease, 'h' .. asker, 'w' .. asker)
if found and found[1] and found[2] and not found[3] and not found[4] then
  local holders, exclusive, permits, last, _, until_, head, tail, waiters, cursor, swept, known,
    more = cmsgpack.unpack(found[1]) -- see META
  local expires, now = match(found[2], '^(%d+)\t0\t'), clock() -- not parked
  local alone = holders == 1 and known and not more and expires and tonumber(expires) > now
  if alone and waiters == 0 and letter == 'x' and last < now then
    call('DEL', key)
    return 1
  end
  -- Who joins a long queue also looks for dead waiters.
  local place = alone and exclusive == 1 and waiters > 0 and (letter == 'x' or waiters <= 8)
    and text(head)
  local waiting = place and call('HGET', key, 'q' .. place)
  local record = waiting and call('HGET', key, 'w' .. waiting)
  if record then
    local asked, queue_ttl, tokens, sent, terms, rest, channel, info = match(record,
      '^(%d+)\t(%d+)\t%d+\t%d+\t(%d+)\t(%d+)\t(x\t%d+\t%d+)(\t([^\t]*)\t(.*))$')
    local ends = asked and asked + queue_ttl
    if asked and now < ends and ends <= until_ then
      local first, count = mint(last, now, tonumber(tokens))
      local held = text(ends) .. '\t0\t' .. terms .. '\t' .. text(first) .. '\t' .. text(count)
        .. '\t' .. stamp .. rest
      -- First: see save in state.lua.
      call('HDEL', key, lease, 'w' .. waiting, 'q' .. place)
      if letter == 'x' then
        call('HSET', key, 'm', cmsgpack.pack(1, 1, permits, first + count - 1, ends, until_,
          head + 1, tail, waiters - 1, '', swept, waiting), 'h' .. waiting, held)
      else
        local own_ttl, own_sent = match(ARGV[6], '^1\t(%d+)\t(%d+)$')
        local own_place, prolonged = text(tail), now + own_ttl > until_
        if prolonged then
          until_ = now + own_ttl
        end
        call('HSET', key, 'm', cmsgpack.pack(1, 1, permits, first + count - 1, ends, until_,
            head + 1, tail + 1, waiters, '', swept, waiting), 'h' .. waiting, held,
          'w' .. asker, stamp .. '\t' .. own_ttl .. '\t' .. own_place .. '\t' .. stamp .. '\t'
            .. ARGV[5] .. '\t' .. own_sent .. sub(ARGV[2], 34) .. ARGV[3],
          'q' .. own_place, asker)
        if prolonged then
          call('PEXPIRE', key, math.ceil((until_ - now) / 1000) + 1)
        end
      end
      local message = table.concat({ 'g', waiting, key, text(first), text(count), sent }, '\t')
      local heard = always_hash and redis.pcall('SPUBLISH', key .. ':' .. channel, message)
      if type(heard) ~= 'number' or heard == 0 then -- see tell in state.lua
        redis.pcall('PUBLISH', channel, message)
      end
      return letter == 'x' and 1 or { { 'q', info, ends - now } }
    end
  end
end
