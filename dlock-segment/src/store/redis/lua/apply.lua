-- Applies a batch of requests to a sale. The number of server calls does not
-- depend on the size of the batch: everything is read at first, worked out in
-- tables, and written at last.
-- ARGV[1]  birth
-- ARGV[2]  the segment to begin with: any number
-- ARGV[3]  msgpack: { runs, items }
--          runs: quantity, count, ... of deductions without id or buyer
--          items: kind, quantity, id, whose, extra, ... with kinds d deduct,
--          h reserve (extra: lasts), c confirm, x cancel, e extend (extra: until),
--          r refund (whose: of), s restock, q resolve, l look
-- Reply: 'N' if there is no such sale, else lines: the view; for each run
--   taken, refusal and parts; for each item F and its record, or a letter:
--   A absent, S sold out, L limit, B before it opens, E ended, P paused,
--   C conflict, M buyer missing, T and what is left: too much, O overflow, G again

local head = load_head(ARGV[1])
if not head then
  return 'N'
end
local batch = cmsgpack.unpack(ARGV[3])
local runs, items = batch[1], batch[2]
local FIELDS = 5
local MAX_UNITS = 9007199254740992
local RECLAIMED = 256

local segments, epoch = head[SEGMENTS], head[EPOCH]
local start = tonumber(ARGV[2]) % segments
local changed, lines = false, {}
local journalling = head[JOURNAL] > 0
local epoch_text, now_text = text(epoch), text(now)

local function note(effect, id, whose, quantity, parts, of_epoch)
  changed = true
  if journalling then
    lines[#lines + 1] = line(effect, id, whose, quantity, parts, of_epoch)
  end
end

---------------------------------------------------------------- segments
-- What is available in the segments looked at, and the changes of each count.
local available, region = {}, nil
local deltas = { {}, {}, {}, {} } -- available, reserved, sold, supplied
-- Segments before `low`, counted from `start`, are empty; none holds more than
-- `single` by itself, if that is known.
local low, single, raised = 0, math.huge, false

local function segment_at(offset)
  local i = start + offset
  return i < segments and i or i - segments
end

local function units(i)
  local found = available[i]
  if not found then
    if region then
      found = struct.unpack('>i8', region, i * 8 + 1)
    else
      local from = (WORDS + i) * 8
      found = struct.unpack('>i8', redis.call('GETRANGE', key, from, from + 7))
    end
    available[i] = found
  end
  return found
end

-- The first segment from this offset on that has something; nil if none has.
local function stocked(offset)
  while offset < segments do
    local i = segment_at(offset)
    if units(i) > 0 then
      return offset
    end
    if not region then
      region = redis.call('GETRANGE', key, WORDS * 8, (WORDS + segments) * 8 - 1)
    end
    if raised then
      offset = offset + 1
    else
      local byte = string.find(region, '[^%z]', i * 8 + 9)
      local found = byte and math.floor((byte - 1) / 8) or segments
      offset = offset + math.min(found, i >= start and segments or start) - i
    end
  end
end

local function add(count, i, delta)
  deltas[count][i] = (deltas[count][i] or 0) + delta
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
    low, single, raised = 0, math.huge, true
  end
  head[TOTALS[from]] = head[TOTALS[from]] - quantity
  head[TOTALS[to]] = head[TOTALS[to]] + quantity
end

-- The first segment that holds so many; nil if they must be gathered.
local function single_with(quantity)
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

-- Takes units that are there; says where from.
local function take(quantity, to)
  local i = single_with(quantity)
  if i then
    move(i, quantity, 1, to)
    return i .. ':' .. quantity
  end
  local parts, missing, offset = {}, quantity, low
  while missing > 0 do
    i = segment_at(offset)
    local some = math.min(units(i), missing)
    move(i, some, 1, to)
    parts[#parts + 1] = i .. ':' .. some
    missing = missing - some
    offset = stocked(offset)
  end
  return table.concat(parts, ',')
end

-- Where the units of a segment of an earlier epoch are counted now.
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

local function move_parts(of_epoch, parts, from, to)
  for segment, quantity in string.gmatch(parts, '(%d+):(%d+)') do
    move(place(of_epoch, tonumber(segment)), tonumber(quantity), from, to)
  end
end

-- `quantity` units of these parts, after the first `skip`.
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

---------------------------------------------------------------- records
local records, is_hold, has = {}, {}, {}
local put, unhold, buyers_changed = {}, {}, {}

local function fill(map, hash, ids)
  if #ids == 0 then
    return
  end
  local found = redis.call('HMGET', hash, unpack(ids))
  for n = 1, #ids do
    map[ids[n]] = found[n] or map[ids[n]]
  end
  return found
end

local RECORD = '^(%a) (%d+) (%d+) (%d+) (%d+) (%d+) (%S*) (.*)$'
local function parse(record)
  local fate, quantity, refunded, of_epoch, at, expires, parts, whose = string.match(record, RECORD)
  if not fate then
    error('DLOCKLAYOUT')
  end
  return {
    fate = fate, quantity = tonumber(quantity), refunded = tonumber(refunded),
    epoch = tonumber(of_epoch), at = at, expires = tonumber(expires), parts = parts, whose = whose,
  }
end

local function write(it)
  return table.concat({
    it.fate, it.quantity, it.refunded, it.epoch, it.at, text(it.expires), it.parts, it.whose,
  }, ' ')
end

-- Keeps what became of an operation. Answers the record as a text.
local function keep(id, record, held)
  records[id] = record
  put[id] = record
  if held then
    head[HOLDS] = head[HOLDS] + (is_hold[id] and 0 or 1)
    is_hold[id] = held
  elseif is_hold[id] then
    head[HOLDS] = head[HOLDS] - 1
    is_hold[id], unhold[id] = nil, true
  end
  changed = true
  return record
end

local function buyer_has(buyer, delta)
  has[buyer] = math.max(0, tonumber(has[buyer] or 0) + delta)
  buyers_changed[buyer] = true
end

-- Ends a reservation: c confirmed, x cancelled, e expired.
local function close(id, it, fate)
  local to = fate == 'c' and 3 or 1
  move_parts(it.epoch, it.parts, 2, to)
  if to == 3 then
    head[SOLD_BY_ID] = head[SOLD_BY_ID] + it.quantity
  elseif it.whose ~= '' then
    buyer_has(it.whose, -it.quantity)
  end
  it.fate = fate
  keep(id, write(it))
  note(fate, id, it.whose, it.quantity, it.parts, it.epoch)
  return it
end

-- What became of an operation, after its time has been looked at.
local function find(id)
  local record = records[id]
  if not record then
    return nil
  end
  local it = parse(record)
  if it.fate == 'h' and it.expires <= now then
    close(id, it, 'e')
  end
  return it
end

local function bury(id)
  local record = keep(id, 'q 0 0 0 ' .. now_text .. ' 0  ')
  note('q', id, '', 0, '', 0)
  return 'F' .. record
end

---------------------------------------------------------------- reading
local expired, more_expired = {}, false
if head[NEXT_EXPIRY] ~= 0 and head[NEXT_EXPIRY] <= now then
  expired = redis.call('ZRANGEBYSCORE', key .. 'x', '-inf', now_text, 'LIMIT', 0, RECLAIMED + 1)
  if #expired > RECLAIMED then
    more_expired = true
    expired[#expired] = nil
  end
end

local ids, seen_ids, buyers, seen_buyers = {}, {}, {}, {}
local function want(list, seen, id)
  if id ~= '' and not seen[id] then
    seen[id] = true
    list[#list + 1] = id
  end
end
for n = 1, #items, FIELDS do
  local kind = items[n]
  want(ids, seen_ids, items[n + 2])
  if kind == 'r' then
    want(ids, seen_ids, items[n + 3])
  else
    want(buyers, seen_buyers, items[n + 3])
  end
end
for _, id in ipairs(expired) do
  want(ids, seen_ids, id)
end

local generation = math.floor(now / head[RETENTION])
if head[BEFORE] ~= 0 and head[BEFORE] >= generation - 1 then
  fill(records, key .. 'o' .. text(head[BEFORE]), ids)
end
if head[GENERATION] ~= 0 and head[GENERATION] >= generation - 1 then
  fill(records, key .. 'o' .. text(head[GENERATION]), ids)
end
if head[HOLDS] > 0 and #ids > 0 then
  local found = fill(records, key .. 'h', ids)
  for n = 1, #ids do
    is_hold[ids[n]] = found[n] and true or nil
  end
end
-- Whose reservations end here, and whose units come back.
for _, id in ipairs(ids) do
  local record = records[id]
  if record then
    local fate = string.sub(record, 1, 1)
    if fate == 'h' or fate == 't' or fate == 'c' then
      want(buyers, seen_buyers, parse(record).whose)
    end
  end
end
fill(has, key .. 'b', buyers)

---------------------------------------------------------------- working
for _, id in ipairs(expired) do
  find(id)
  if not is_hold[id] and not unhold[id] then -- only its time was left
    unhold[id], changed = true, true
  end
end

-- Why so many units cannot be taken for this buyer; nil if they can.
local function refusal(quantity, buyer)
  if head[PAUSED] ~= 0 then
    return 'P'
  elseif now < head[OPENS] then
    return 'B'
  elseif head[CLOSES] ~= 0 and now >= head[CLOSES] then
    return 'E'
  end
  local limit = head[PER_BUYER]
  if limit ~= 0 then
    if buyer == '' then
      return 'M'
    elseif tonumber(has[buyer] or 0) + quantity > limit then
      return more_expired and quantity <= limit and 'G' or 'L'
    end
  end
  if head[AVAILABLE] < quantity then
    return more_expired and 'G' or 'S'
  end
end

-- The answer to a request under an id that is known.
local function again(it, fates, quantity, whose)
  if it.fate == 'q' or (string.find(fates, it.fate, 1, true)
      and it.quantity == quantity and it.whose == whose) then
    return 'F' .. write(it)
  end
  return 'C'
end

local function taken(fate, quantity, id, buyer, expires)
  local parts = take(quantity, fate == 'h' and 2 or 3)
  if buyer ~= '' then
    buyer_has(buyer, quantity)
  end
  local record = fate .. ' ' .. quantity .. ' 0 ' .. epoch_text .. ' ' .. now_text
    .. ' ' .. expires .. ' ' .. parts .. ' ' .. buyer
  note(fate, id, buyer, quantity, parts, epoch_text)
  return record
end

local act = {}

function act.d(quantity, id, buyer)
  local it = id ~= '' and find(id)
  if it then
    return again(it, 't', quantity, buyer)
  end
  local refused = refusal(quantity, buyer)
  if refused then
    return refused
  end
  local record = taken('t', quantity, id, buyer, '0')
  if id ~= '' then
    head[SOLD_BY_ID] = head[SOLD_BY_ID] + quantity
    keep(id, record)
  end
  return 'F' .. record
end

function act.h(quantity, id, buyer, lasts)
  local it = find(id)
  if it then
    return again(it, 'hcxe', quantity, buyer)
  end
  local refused = refusal(quantity, buyer)
  if refused then
    return refused
  end
  local expires = now + lasts
  return 'F' .. keep(id, taken('h', quantity, id, buyer, text(expires)), expires)
end

local function close_by(id, fate)
  local it = find(id)
  if not it then
    return fate == 'x' and bury(id) or 'A'
  elseif it.fate == 'h' then
    close(id, it, fate)
  elseif not string.find('cxeq', it.fate, 1, true) then
    return 'C'
  end
  return 'F' .. write(it)
end

function act.c(_, id)
  return close_by(id, 'c')
end

function act.x(_, id)
  return close_by(id, 'x')
end

function act.e(_, id, _, until_then)
  local it = find(id)
  if not it then
    return 'A'
  elseif it.fate == 'h' then
    if until_then > it.expires then
      it.expires = until_then
      keep(id, write(it), until_then)
      note('m', id, it.whose, it.quantity, it.parts, it.epoch)
    end
  elseif not string.find('cxeq', it.fate, 1, true) then
    return 'C'
  end
  return 'F' .. write(it)
end

function act.r(quantity, id, of)
  local it = find(id)
  if it then
    return again(it, 'r', quantity == 0 and it.quantity or quantity, of)
  end
  local target = find(of)
  if not target then
    return 'A'
  elseif string.find('xeq', target.fate, 1, true) then
    return 'T0'
  elseif target.fate ~= 't' and target.fate ~= 'c' then
    return 'C'
  end
  local left = target.quantity - target.refunded
  if quantity == 0 then
    quantity = left
  end
  if left == 0 or quantity > left then
    return 'T' .. left
  end
  local parts = cut(target.parts, target.refunded, quantity)
  move_parts(target.epoch, parts, 3, 1)
  head[SOLD_BY_ID] = head[SOLD_BY_ID] - quantity
  if target.whose ~= '' then
    buyer_has(target.whose, -quantity)
  end
  target.refunded = target.refunded + quantity
  keep(of, write(target))
  note('r', id, of, quantity, parts, target.epoch)
  return 'F' .. keep(id, write({
    fate = 'r', quantity = quantity, refunded = 0, epoch = target.epoch, at = now_text,
    expires = 0, parts = parts, whose = of,
  }))
end

function act.s(quantity, id)
  local it = id ~= '' and find(id)
  if it then
    return again(it, 's', quantity, '')
  end
  if head[AVAILABLE] + head[RESERVED] + head[SOLD] + quantity >= MAX_UNITS then
    return 'O'
  end
  local parts = {}
  for offset, some in ipairs(shares(quantity, segments)) do
    if some > 0 then
      local i = segment_at(offset - 1)
      add(1, i, some)
      add(4, i, some)
      available[i] = units(i) + some
      parts[#parts + 1] = i .. ':' .. some
    end
  end
  low, single, raised = 0, math.huge, true
  head[AVAILABLE] = head[AVAILABLE] + quantity
  head[RESTOCKED] = head[RESTOCKED] + quantity
  note('s', id, '', quantity, table.concat(parts, ','), epoch_text)
  local record = 's ' .. quantity .. ' 0 ' .. epoch_text .. ' ' .. now_text .. ' 0  '
  return 'F' .. (id ~= '' and keep(id, record) or record)
end

function act.q(_, id)
  local it = find(id)
  return it and 'F' .. write(it) or bury(id)
end

function act.l(_, id)
  local it = find(id)
  return it and 'F' .. write(it) or 'A'
end

-- Deductions without id or buyer, as many at a time as a segment has.
local function run(quantity, count)
  local done, parts = 0, {}
  while done < count do
    local refused = refusal(quantity, '')
    if refused then
      return done .. ' ' .. refused .. ' ' .. table.concat(parts, ',')
    end
    local i = single_with(quantity)
    if i then
      local some = math.min(math.floor(units(i) / quantity), count - done)
      move(i, some * quantity, 1, 3)
      parts[#parts + 1] = i .. ':' .. some * quantity
      note('t', '', '', some * quantity, parts[#parts], epoch_text)
      done = done + some
    else
      parts[#parts + 1] = take(quantity, 3)
      note('t', '', '', quantity, parts[#parts], epoch_text)
      done = done + 1
    end
  end
  return done .. ' - ' .. table.concat(parts, ',')
end

local reply = { '' }
for n = 1, #runs, 2 do
  reply[#reply + 1] = run(runs[n], runs[n + 1])
end
for n = 1, #items, FIELDS do
  reply[#reply + 1] = act[items[n]](items[n + 1], items[n + 2], items[n + 3], items[n + 4])
end

---------------------------------------------------------------- writing
if not changed then
  if #expired == 0 and head[NEXT_EXPIRY] ~= 0 and head[NEXT_EXPIRY] <= now then
    -- It was ended before its time, or prolonged: look when the next one is due.
    local first = redis.call('ZRANGE', key .. 'x', 0, 0, 'WITHSCORES')
    head[NEXT_EXPIRY] = tonumber(first[2] or 0)
    redis.call('SETRANGE', key, 0, pack_head(head))
  end
  reply[1] = view(head)
  return table.concat(reply, '\n')
end

-- A call with many arguments, in pieces that fit on Lua's stack.
local function call_with(command, hash, list)
  for from = 1, #list, 4000 do
    redis.call(command, hash, unpack(list, from, math.min(from + 3999, #list)))
  end
end

local ops = {}
for count = 1, 4 do
  for i, delta in pairs(deltas[count]) do
    if delta ~= 0 then
      local n = #ops
      ops[n + 1], ops[n + 2], ops[n + 3] = 'INCRBY', 'i64', '#' .. WORDS + (count - 1) * segments + i
      ops[n + 4] = text(delta)
    end
  end
end
call_with('BITFIELD', key, ops)

local gone, kept, held, expiries, left = {}, {}, {}, {}, {}
for id in pairs(unhold) do
  gone[#gone + 1] = id
end
for id, record in pairs(put) do
  local expires = is_hold[id]
  local into = expires and held or kept
  into[#into + 1] = id
  into[#into + 1] = record
  if expires then
    expiries[#expiries + 1] = text(expires)
    expiries[#expiries + 1] = id
  end
end
call_with('HDEL', key .. 'h', gone)
call_with('ZREM', key .. 'x', gone)
call_with('HSET', key .. 'h', held)
call_with('ZADD', key .. 'x', expiries)
if #gone > 0 or #expiries > 0 then
  local first = redis.call('ZRANGE', key .. 'x', 0, 0, 'WITHSCORES')
  head[NEXT_EXPIRY] = tonumber(first[2] or 0)
end
if #kept > 0 then
  local fresh = generation > head[GENERATION]
  if fresh then
    head[BEFORE], head[GENERATION] = head[GENERATION], generation
  end
  local name = key .. 'o' .. text(head[GENERATION])
  call_with('HSET', name, kept)
  if fresh then
    redis.call('PEXPIREAT', name, text((generation + 3) * head[RETENTION]))
  end
end
gone, kept = {}, {}
for buyer in pairs(buyers_changed) do
  if has[buyer] == 0 then
    gone[#gone + 1] = buyer
  else
    kept[#kept + 1] = buyer
    kept[#kept + 1] = text(has[buyer])
  end
end
call_with('HDEL', key .. 'b', gone)
call_with('HSET', key .. 'b', kept)
if #lines > 0 then
  write_journal(head, lines)
end
head[CHANGES] = head[CHANGES] + 1
redis.call('SETRANGE', key, 0, pack_head(head))
reply[1] = view(head)
return table.concat(reply, '\n')
