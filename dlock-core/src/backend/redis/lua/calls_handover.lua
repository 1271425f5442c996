-- calls, the short way of a mutex that clients hand to each other, which is a hash: one release,
-- one acquire that queues, or one that gives up a lease and queues. There is one holder, and who
-- waits first wants a mutex too. A release of the only holder, of whatever mode, is made here as
-- well if nobody waits. What is not done here is left to what follows, which would do the same,
-- but takes twice as long. An error is the reply of the script: it has one call.

local letter, key = ARGV[1], KEYS[1]
local ends, asks -- the owner whose lease ends, and the one that asks
if letter == 'x' then
  ends = (always_hash or disputed) and sub(ARGV[2], 2)
elseif (letter == 'a' or letter == 'i') and ARGV[5] ~= '0' and sub(ARGV[6], 1, 1) == '1' then
  ends, asks = letter == 'i' and sub(ARGV[7], 2), sub(ARGV[2], 2, 33)
end
local found = (ends or asks)
  and redis.pcall('HMGET', key, 'm', 'h' .. (ends or ''), 'h' .. (asks or ''), 'w' .. (asks or ''))
if found and found[1] and not found[3] and not found[4] then
  local now = clock()
  local holders, exclusive, permits, last, soonest, until_, head, tail, waiters, cursor, swept,
    known, more = cmsgpack.unpack(found[1]) -- see META
  local usual = holders == 1 and known and known ~= '' and not more
  local dropped, fields, notice, channel, info, prolonged

  -- The holder stays. Who it is, is told.
  local function stays()
    local record = exclusive == 1 and now < soonest and call('HGET', key, 'h' .. known)
    info = record and match(record, string.rep('[^\t]*\t', 9) .. '(.*)$')
    fields = {}
    if waiters == 0 then
      head = tail -- places before it are empty
    end
    return info
  end

  -- The first waiter becomes the holder.
  local function passes_on()
    local place = text(head)
    local owner = call('HGET', key, 'q' .. place)
    local record = owner and call('HGET', key, 'w' .. owner)
    local asked, queue_ttl, tokens, sent, terms
    asked, queue_ttl, tokens, sent, terms, channel, info = match(record or '',
      '^(%d+)\t(%d+)\t%d+\t%d+\t(%d+)\t(%d+)\t(x\t%d+\t%d+)\t([^\t]*)\t(.*)$')
    local expires = asked and asked + queue_ttl
    if not asked or expires <= now or until_ < expires then
      return false
    end
    local first, count = mint(last, now, tonumber(tokens))
    local digits, counted = text(first), text(count)
    dropped = { 'h' .. ends, 'w' .. owner, 'q' .. place }
    fields = { 'h' .. owner, text(expires) .. '\t0\t' .. terms .. '\t' .. digits .. '\t' .. counted
      .. '\t' .. stamp .. '\t' .. channel .. '\t' .. info }
    notice = table.concat({ 'g', owner, key, digits, counted, sent }, '\t')
    head, waiters, known = head + 1, waiters - 1, owner
    last, soonest, cursor = first + count - 1, expires, ''
    return true
  end

  local function joins()
    local queue_ttl, sent = match(ARGV[6], '^1\t(%d+)\t(%d+)$')
    local place = text(tail)
    fields[#fields + 1] = 'w' .. asks
    fields[#fields + 1] = stamp .. '\t' .. queue_ttl .. '\t' .. place .. '\t' .. stamp .. '\t'
      .. ARGV[5] .. '\t' .. sent .. sub(ARGV[2], 34) .. ARGV[3]
    fields[#fields + 1] = 'q' .. place
    fields[#fields + 1] = asks
    tail, waiters = tail + 1, waiters + 1
    if until_ < now + queue_ttl then
      until_, prolonged = now + queue_ttl, true
    end
  end

  -- Whether a lease ends that lasts, and is not parked.
  local expires = usual and ends and found[2] and match(found[2], '^(%d+)\t0\t')
  local lasts = expires and now < tonumber(expires)
  if lasts and not asks and waiters == 0 and last < now then
    call('DEL', key)
    return 1
  end
  -- Who joins a long queue also looks for dead waiters.
  if usual and (not asks or waiters < 8) and (lasts and exclusive == 1 and waiters > 0
    and passes_on() or not ends and stays()) then
    if asks then
      joins()
    end
    if dropped then -- first: see save in state.lua
      call('HDEL', key, unpack(dropped))
    end
    call('HSET', key, 'm', cmsgpack.pack(1, 1, permits, last, soonest, until_, head, tail, waiters,
      cursor, swept, known), unpack(fields))
    if prolonged then
      call('PEXPIRE', key, math.ceil((until_ - now) / 1000) + 1)
    end
    if notice then -- see tell in state.lua
      local heard = always_hash and redis.pcall('SPUBLISH', key .. ':' .. channel, notice)
      if type(heard) ~= 'number' or heard == 0 then
        redis.pcall('PUBLISH', channel, notice)
      end
    end
    return asks and { { 'q', info, soonest - now } } or 1
  end
end
