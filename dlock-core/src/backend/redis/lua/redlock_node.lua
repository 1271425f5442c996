-- What the scripts of a quorum share: a node, and the state of a key at it. It must do what
-- backend/redis/redlock/model.rs does; the rules are in redlock/quorum.rs.
--
-- The marker, `dlock:2:{namespace}:v`, tells since when the node may be trusted to
-- remember: run id (40 characters), since when it counts (16 digits), and the longest ttl
-- in milliseconds. It is written anew when it is missing (the node is new, or was emptied)
-- or has another run id (the node was started again). Until the silence has passed since
-- then, the node does not vote.
--
-- A lock is `dlock:2:{namespace:key}:q`, a string:
--    1..16   register: the last token that was voted for
--   17       1 if somebody may wait, else 0
--   18..33   when the lease ends, by this node's clock in microseconds; 0 if there is none
--   34..81   mark: owner (32 characters) and number of the try (16 digits)
--   82..97   the first token
--   98..113  since when
--  114..     the holder as JSON
-- It is missing when there is no lease and the clock has passed the register by SLACK.
-- Who waits is in the hash `dlock:2:{namespace:key}:qw`, by owner: until when, since when,
-- channel, holder, with tabs between.

local call, sub, format, match = redis.call, string.sub, string.format, string.match

-- How far below the clock tokens may be, and how far above it; see redlock/quorum.rs.
local SLACK, LEAD = 2000000, 2000000
-- The most waiters that one call tells.
local MOST_TOLD = 16

local time = call('TIME')
local now = time[1] * 1000000 + time[2]

local function digits(number)
  local millions = math.floor(number / 1000000)
  return format('%010d%06d', millions, number - millions * 1000000)
end

-- The marker's run id, since when it counts, and the longest ttl. It is written when it is
-- missing, or when the node is known to have another run id.
local function marker(key, run_id, longest)
  local found = call('GET', key)
  if found and (not run_id or sub(found, 1, 40) == run_id) then
    return sub(found, 1, 40), tonumber(sub(found, 41, 56)), tonumber(sub(found, 57))
  end
  run_id = run_id or match(call('INFO', 'server'), 'run_id:(%x+)')
  if found then
    longest = sub(found, 57) -- what was agreed on holds
  end
  call('SET', key, run_id .. digits(now) .. longest)
  return run_id, now, tonumber(longest)
end

-- The state of a key.
local function load(key)
  local found = call('GET', key)
  if not found then
    return { key = key, register = 0, waits = '0', ends = 0, mark = '', there = false }
  end
  if #found < 113 then
    error('DLOCKLAYOUT')
  end
  return {
    key = key, there = true, register = tonumber(sub(found, 1, 16)), waits = sub(found, 17, 17),
    ends = tonumber(sub(found, 18, 33)), mark = sub(found, 34, 81), first = sub(found, 82, 97),
    since = sub(found, 98, 113), info = sub(found, 114),
  }
end

local function is_held(state)
  return state.ends > now
end

-- The owner of the lease.
local function owner_of(mark)
  return sub(mark, 1, 32)
end

-- What the register counts for: when it is missing, the clock minus SLACK.
local function register(state)
  return math.max(state.register, now - SLACK)
end

-- Those who wait and are alive, the first one first. Others than this owner.
local function waiters(state, owner)
  local alive = {}
  if state.waits == '0' then
    return alive
  end
  local found = call('HGETALL', state.key .. 'w')
  for i = 1, #found, 2 do
    local ends, since, channel, info = match(found[i + 1], '^(%d+)\t(%d+)\t([^\t]*)\t(.*)$')
    if ends and tonumber(ends) > now and found[i] ~= owner then
      alive[#alive + 1] = {
        owner = found[i], since = tonumber(since), channel = channel, info = info,
      }
    end
  end
  table.sort(alive, function(a, b)
    return a.since < b.since or (a.since == b.since and a.owner < b.owner)
  end)
  return alive
end
