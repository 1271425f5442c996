-- Changes an inventory as a whole.
-- ARGV: birth, then one of
--   'w' opens closes: the opening times; 'p' 0 or 1: paused; 'l' units: limit per buyer;
--   'r' milliseconds: the retention; 'z' segments: resize; 'b': rebalance;
--   'y': all homes were made; 'u' changes: they are counted from here at least;
--   's' version opens closes paused limit retention: the settings
--   of all homes, unless it has newer ones
-- Reply: the view, or 'N' if there is no such inventory ('R' if it was removed).

local head = load_head(ARGV[1])
if not head then
  return missing(ARGV[1])
end

local function region(number)
  local size = head[SEGMENTS] * 8
  local from = WORDS * 8 + number * size
  local raw = redis.call('GETRANGE', key, from, from + size - 1)
  local numbers = {}
  for i = 1, head[SEGMENTS] do
    numbers[i] = struct.unpack('>i8', raw, i * 8 - 7)
  end
  return numbers
end

-- Reserved and sold units stay in their segments, modulo the new number of segments.
-- Available units are distributed again.
local function lay_out(segments)
  local available = shares(head[AVAILABLE], segments)
  local reserved, sold, supplied = {}, {}, {}
  for i = 1, segments do
    reserved[i], sold[i] = 0, 0
  end
  local reserved_before, sold_before = region(1), region(2)
  for i = 1, head[SEGMENTS] do
    local into = (i - 1) % segments + 1
    reserved[into] = reserved[into] + reserved_before[i]
    sold[into] = sold[into] + sold_before[i]
  end
  for i = 1, segments do
    supplied[i] = available[i] + reserved[i] + sold[i]
  end
  head[SEGMENTS] = segments
  return words(available) .. words(reserved) .. words(sold) .. words(supplied)
end

-- The generation that is written to goes on, for one new retention from now on.
local function change_retention(retention)
  head[NUMBER], head[SINCE] = math.max(generation_of(head), head[GENERATION]), now
  head[RETENTION] = retention
end

local what = ARGV[2]
if what == 's' and tonumber(ARGV[3]) <= head[VERSION] then
  return view(head)
end
local regions, journalled
local retention_changed = what == 'r'
if what == 'w' then
  head[OPENS], head[CLOSES] = tonumber(ARGV[3]), tonumber(ARGV[4])
elseif what == 'p' then
  head[PAUSED] = tonumber(ARGV[3])
elseif what == 'l' then
  head[PER_BUYER] = tonumber(ARGV[3])
elseif what == 'r' then
  change_retention(tonumber(ARGV[3]))
elseif what == 'y' then
  if not has_flag(head, COMPLETE) then
    head[LAYOUT] = head[LAYOUT] + COMPLETE
  end
elseif what == 'u' then
  head[CHANGES] = math.max(head[CHANGES], tonumber(ARGV[3]))
elseif what == 's' then
  head[VERSION] = tonumber(ARGV[3])
  head[OPENS], head[CLOSES] = tonumber(ARGV[4]), tonumber(ARGV[5])
  head[PAUSED], head[PER_BUYER] = tonumber(ARGV[6]), tonumber(ARGV[7])
  retention_changed = tonumber(ARGV[8]) ~= head[RETENTION]
  if retention_changed then
    change_retention(tonumber(ARGV[8]))
  end
elseif what == 'z' then
  regions = lay_out(tonumber(ARGV[3]))
  head[EPOCH] = head[EPOCH] + 1
  journalled = line('z', '', '', ARGV[3], '', text(head[EPOCH]))
else
  regions = lay_out(head[SEGMENTS])
  journalled = line('b', '', '', '0', '', text(head[EPOCH]))
end
head[CHANGES] = head[CHANGES] + 1
if journalled and head[JOURNAL] > 0 then
  write_journal(head, { journalled })
end
if regions then
  redis.call('SET', key, pack_head(head) .. regions)
else
  redis.call('SETRANGE', key, 0, pack_head(head))
end
if retention_changed then
  expire_generation(head, head[GENERATION])
  expire_generation(head, head[BEFORE])
end
if what == 'z' then
  redis.call('RPUSH', key .. 'z', ARGV[3])
end
return view(head)
