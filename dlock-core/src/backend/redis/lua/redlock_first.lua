-- calls at a node, the first part: votes for keys that nobody has or waits for, and leases
-- that are given back while nobody waits. Most calls of most programs are such. They compare
-- numbers of sixteen digits as strings, and nothing is taken apart. Arguments and layout are
-- described in what follows, which makes the calls that are left, and would make these in
-- the same way. Later calls on a key that is left are left too, so that they keep their order.
local sub, format = string.sub, string.format
local time = redis.call('TIME')
local seconds, micros = time[1], format('%06d', time[2])
local now, below, above = seconds .. micros, (seconds - 2) .. micros, (seconds + 2) .. micros
local replies, rest, deferred, at = {}, nil, nil, 4
local votes, voting -- whether it votes, when that is known
local ttl, ends, kept -- of the call before

for i = 1, #KEYS - 1 do
  local key, letter, mark, reply, arguments = KEYS[i + 1], sub(ARGV[1], i, i), ARGV[at], nil, 8
  if letter == 'a' and not (deferred and deferred[key]) then
    if not voting then
      local marker = redis.call('GET', KEYS[1])
      voting = true
      votes = marker and #now == 16
        and sub(marker, 41, 56) + ARGV[2] <= seconds * 1000000 + time[2]
    end
    local first, last, found = ARGV[at + 2], ARGV[at + 3], redis.pcall('GET', key)
    if votes and first > below and last <= above and (not found or type(found) == 'string'
      and #found >= 113 and sub(found, 17, 33) <= '0' .. now and first > sub(found, 1, 16)) then
      if ttl ~= ARGV[at + 1] then
        ttl = ARGV[at + 1]
        local length = time[2] + ttl
        local carry = math.floor(length / 1000000)
        ends = format('%010d%06d', seconds + carry, length - carry * 1000000)
        kept = math.ceil(math.max(ttl, 4000000) / 1000) + 1 -- SLACK and LEAD
      end
      local set = redis.pcall('SET', key,
        last .. '0' .. ends .. mark .. first .. now .. ARGV[at + 4], 'PX', kept)
      reply = set.err and set or 1
    end
  elseif letter == 'u' or letter == 'x' then
    arguments = 1
    local found = not (deferred and deferred[key]) and redis.pcall('GET', key)
    if type(found) == 'string' and sub(found, 34, 81) == mark and sub(found, 17, 17) == '0'
      and sub(found, 18, 33) > now and #now == 16 then
      local last = sub(found, 1, 16)
      if last <= below then
        redis.call('DEL', key)
        reply = 1
      -- A server that is out of memory refuses this: then it is deleted first.
      elseif last <= now and not redis.pcall('SET', key,
        last .. string.rep('0', 65) .. sub(found, 82, 113), 'PX', 2001).err then -- SLACK
        reply = 1
      end
    end
  end
  if reply then
    replies[i] = reply
  else
    rest, deferred = rest or {}, deferred or {}
    rest[#rest + 1], deferred[key] = { i, letter, at }, true
  end
  at = at + arguments
end
if not rest then
  return replies
end

