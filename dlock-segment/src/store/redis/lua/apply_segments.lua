-- The segments that a batch reads and changes.

-- The available units of the segments that were read, and the changes of each count.
local available, looked, region = {}, false, nil
local deltas = { {}, {}, {}, {} } -- available, reserved, sold, supplied
-- Segments before `low`, counted from `start`, are empty. No segment has more than `single`
-- units.
local low, single, raised = 0, math.huge, false

local function segment_at(offset)
  local i = start + offset
  return i < segments and i or i - segments
end

local function load_region()
  region = region or redis.call('GETRANGE', key, WORDS * 8, (WORDS + segments) * 8 - 1)
end

-- The available units of a segment. The first one is read alone; after that all are read.
local function units(i)
  local found = available[i]
  if not found then
    if looked then
      load_region()
      found = struct.unpack('>i8', region, i * 8 + 1)
    else
      local from = (WORDS + i) * 8
      found = struct.unpack('>i8', redis.call('GETRANGE', key, from, from + 7))
      looked = true
    end
    available[i] = found
  end
  return found
end

-- The offset of the first segment from this one on that has units; nil if none has.
local function stocked(offset)
  while offset < segments do
    local i = segment_at(offset)
    if units(i) > 0 then
      return offset
    end
    load_region()
    if raised then
      offset = offset + 1
    else
      local not_zero = string.match(region, '^%z*()', i * 8 + 9)
      local found = math.floor((not_zero - 1) / 8)
      offset = offset + math.min(found, i >= start and segments or start) - i
    end
  end
end

local function add(count, i, delta)
  local of = deltas[count]
  of[i] = (of[i] or 0) + delta
end

-- A part as a string. Making strings from numbers costs most here, and most requests are
-- alike, so the strings are kept.
local part_texts = {}
local function part(i, quantity)
  local of = part_texts[quantity]
  if not of then
    of = {}
    part_texts[quantity] = of
  end
  local found = of[i]
  if not found then
    found = i .. ':' .. quantity
    of[i] = found
  end
  return found
end

-- Moves units between counts: 1 available, 2 reserved, 3 sold.
local TOTALS = { AVAILABLE, RESERVED, SOLD }
local function move(i, quantity, from, to)
  add(from, i, -quantity)
  add(to, i, quantity)
  if from == 1 then
    available[i] = units(i) - quantity
  elseif to == 1 then
    available[i] = units(i) + quantity
    low, raised = math.min(low, (i - start) % segments), true
    single = math.max(single, available[i])
    head[INFLOW] = head[INFLOW] + quantity
  end
  head[TOTALS[from]] = head[TOTALS[from]] - quantity
  head[TOTALS[to]] = head[TOTALS[to]] + quantity
end

-- The first segment that has this quantity; nil if several must be used.
local function single_with(quantity)
  local first = segment_at(low)
  if (available[first] or 0) >= quantity then
    return first
  end
  low = stocked(low)
  if quantity > single then
    return nil
  end
  local offset = low
  while offset do
    local i = segment_at(offset)
    if units(i) >= quantity then
      return i
    end
    offset = stocked(offset + 1)
  end
  single = quantity - 1
end

-- Adds available units evenly; the remainder goes to the first segments. Returns the parts.
local function supply(quantity)
  local each = math.floor(quantity / segments)
  local odd = quantity - each * segments
  local parts = {}
  for offset = 0, (each > 0 and segments or odd) - 1 do
    local i, some = segment_at(offset), each + (offset < odd and 1 or 0)
    add(1, i, some)
    add(4, i, some)
    available[i] = units(i) + some
    parts[#parts + 1] = i .. ':' .. some
  end
  low, single, raised = 0, math.huge, true
  head[AVAILABLE] = head[AVAILABLE] + quantity
  head[INFLOW] = head[INFLOW] + quantity
  return table.concat(parts, ',')
end

-- Takes available units. Returns the parts.
local function take(quantity, to)
  local i = single_with(quantity)
  if i then
    move(i, quantity, 1, to)
    return part(i, quantity)
  end
  local parts, missing, offset = {}, quantity, low
  while missing > 0 do
    i = segment_at(offset)
    local some = math.min(units(i), missing)
    move(i, some, 1, to)
    parts[#parts + 1] = part(i, some)
    missing = missing - some
    offset = stocked(offset)
  end
  return table.concat(parts, ',')
end

-- The segment in which the units of a segment of an earlier epoch are counted now.
local sizes
local function place(of_epoch, segment)
  if of_epoch ~= epoch then
    sizes = sizes or redis.call('LRANGE', key .. 'z', 0, -1)
    for later = of_epoch + 2, #sizes do
      segment = segment % tonumber(sizes[later])
    end
  end
  return segment
end

-- The number of units in these parts; nil if one of the segments does not exist.
local function sum_of_parts(of_epoch, parts)
  local sum = 0
  for segment, quantity in string.gmatch(parts, '(%d+):(%d+)') do
    if place(of_epoch, tonumber(segment)) >= segments then
      return nil
    end
    sum = sum + tonumber(quantity)
  end
  return sum
end

local function move_parts(of_epoch, parts, from, to)
  for segment, quantity in string.gmatch(parts, '(%d+):(%d+)') do
    move(place(of_epoch, tonumber(segment)), tonumber(quantity), from, to)
  end
end

-- The parts of `quantity` units, after the first `skip` units.
local function cut(parts, skip, quantity)
  local some = {}
  for segment, count in string.gmatch(parts, '(%d+):(%d+)') do
    count = tonumber(count)
    local here = math.min(math.max(0, count - skip), quantity)
    skip = math.max(0, skip - count)
    if here > 0 then
      some[#some + 1] = segment .. ':' .. here
      quantity = quantity - here
    end
  end
  return table.concat(some, ',')
end

