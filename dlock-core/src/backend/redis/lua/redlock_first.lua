-- calls at a node, the first part: votes for keys that nobody has or waits for, and leases
-- that are given back while nobody waits. Most calls of most programs are such. They compare
-- numbers of sixteen digits as strings, and nothing is taken apart. Arguments and layout are
-- described in what follows, which makes the calls that are left, and would make these in
-- the same way. Later calls on a key that is left are left too, so that they keep their order.
local sub, format = string.sub, string.format
local time = redis.call('TIME')
local seconds, micros = time[1], format('%06d', time[2])
local now, below, above = seconds .. micros, (seconds - 2) .. micros, (seconds + 2) .. micros
local free = '0' .. now -- nobody waits, and the lease is over
local letters, count, at, terms = ARGV[1], #KEYS - 1, 4, nil
local replies, all_yes, rest, deferred = {}, true, nil, nil
local votes, voting -- whether it votes, when that is known
local ttl, ends, kept, first -- of the terms
local before, after -- what is written around a mark, or nil if it does not vote for the terms
local released = string.rep('0', 97) -- what follows the register

for i = 1, count do
  local key, letter, mark, reply, arguments = KEYS[i + 1], sub(letters, i, i), ARGV[at], nil, 1
  if letter == 'a' then
    arguments, terms, first = 8, at, ARGV[at + 2]
    local last = ARGV[at + 3]
    if not voting then
      local marker = redis.call('GET', KEYS[1])
      voting = true
      votes = marker and #now == 16
        and sub(marker, 41, 56) + ARGV[2] <= seconds * 1000000 + time[2]
    end
    if ttl ~= ARGV[at + 1] then
      ttl = ARGV[at + 1]
      local length = time[2] + ttl
      local carry = math.floor(length / 1000000)
      ends = format('%010d%06d', seconds + carry, length - carry * 1000000)
      kept = format('%d', math.ceil(math.max(ttl, 4000000) / 1000) + 1) -- SLACK and LEAD
    end
    before = votes and first > below and last <= above and last .. '0' .. ends or nil
    after = first .. now .. ARGV[at + 4]
  elseif letter == 'r' then
    arguments = 8
  end
  if deferred and deferred[key] then
    reply = nil
  elseif letter == 'a' or letter == 's' then
    local found = before and redis.pcall('GET', key)
    -- A register below the first token, as a string: both start with sixteen digits.
    if found == false or type(found) == 'string' and #found >= 113 and found < first
      and sub(found, 17, 33) <= free then
      local set = redis.pcall('SET', key, before .. mark .. after, 'PX', kept)
      reply = set.err and set or 1
    end
  elseif letter == 'u' or letter == 'x' then
    local found = redis.pcall('GET', key)
    if type(found) == 'string' and sub(found, 34, 81) == mark and #now == 16 then
      local lease, last = sub(found, 17, 33), sub(found, 1, 16)
      if lease > free and lease < '1' then
        if last <= below then
          redis.call('DEL', key)
          reply = 1
        -- A server that is out of memory refuses this: then it is deleted first.
        elseif last <= now and not redis.pcall('SET', key, last .. released, 'PX', '2001').err then -- SLACK
          reply = 1
        end
      end
    end
  end
  if reply then
    replies[i] = reply
    all_yes = all_yes and reply == 1
  else
    rest, deferred = rest or {}, deferred or {}
    rest[#rest + 1], deferred[key] = { i, letter, at, terms }, true
  end
  at = at + arguments
end
if not rest then
  return all_yes and 1 or replies
end

