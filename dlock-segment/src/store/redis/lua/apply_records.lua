-- The records that a batch reads and writes.

-- By operation id: its record, and whether it is an open reservation. By buyer: how many
-- units the buyer has.
local records, is_hold, has = {}, {}, {}
-- The ids that have a record.
local seen = {}
-- To be written: ids and records in turn, of which the last of an id counts; ids that are
-- not open reservations any more; open reservations; buyers.
local kept, unhold, held, buyers_changed = {}, {}, {}, {}

local generation = generation_of(head)
if generation > head[GENERATION] then
  head[TOMBSTONES] = 0
end
local function look_in(hash, ids, marks)
  local found = redis.call('HMGET', hash, unpack(ids))
  local any = false
  for n = 1, #ids do
    local record = found[n]
    if record then
      local id = ids[n]
      records[id], any = record, true
      seen[#seen + 1] = id
      if marks then
        marks[id] = true
      end
    end
  end
  return any
end

-- Looks ids up, the latest record last. Returns whether any has a record.
local function look_up(ids)
  local any = false
  if #ids == 0 then
    return any
  end
  for _, period in ipairs({ head[BEFORE], head[GENERATION] }) do
    if period ~= 0 and period >= generation - 1 then
      any = look_in(records_of(head, period), ids) or any
    end
  end
  if head[HOLDS] > 0 then
    any = look_in(key .. 'h', ids, is_hold) or any
  end
  return any
end

-- Decodes a record; nil if it has another format, or would break the counts.
local RECORD = '^([thcxergswqd]) (%d+) (%d+) (%d+) (%d+) (%d+) ([%d:,]*) (%C*)$'
local function parse(record)
  local status, quantity, refunded, of_epoch, at, expires, parts, whose = string.match(record, RECORD)
  if not status then
    return nil
  end
  local it = {
    status = status, quantity = tonumber(quantity), refunded = tonumber(refunded),
    epoch = tonumber(of_epoch), at = at, expires = tonumber(expires), parts = parts, whose = whose,
  }
  local holds_units = status == 't' or status == 'h' or status == 'c'
  if it.quantity >= MAX_UNITS or it.refunded > it.quantity or it.epoch > epoch
      or (holds_units and sum_of_parts(it.epoch, parts) ~= it.quantity) then
    return nil
  end
  return it
end

-- Encodes a record.
local function write(it)
  if it.status == '?' then
    return 'U'
  end
  return table.concat({
    it.status, it.quantity, it.refunded, it.epoch, it.at, text(it.expires), it.parts, it.whose,
  }, ' ')
end

-- Keeps the record of an operation. With `expires` it is an open reservation until then.
-- Returns the record.
local function keep(id, record, expires)
  records[id] = record
  changed = true
  if expires then
    head[HOLDS] = head[HOLDS] + (is_hold[id] and 0 or 1)
    is_hold[id], held[id] = true, expires
    return record
  end
  if is_hold[id] then
    head[HOLDS] = head[HOLDS] - 1
    is_hold[id], held[id], unhold[id] = nil, nil, true
  end
  local n = #kept
  kept[n + 1], kept[n + 2] = id, record
  return record
end

local function buyer_has(buyer, delta)
  has[buyer] = math.max(0, has[buyer] + delta)
  buyers_changed[buyer] = true
end

-- Ends a reservation: c confirmed, x cancelled, e expired.
local function close(id, it, status)
  local to = status == 'c' and 3 or 1
  move_parts(it.epoch, it.parts, 2, to)
  if to == 3 then
    head[SOLD_BY_ID] = head[SOLD_BY_ID] + it.quantity
  elseif it.whose ~= '' then
    buyer_has(it.whose, -it.quantity)
  end
  it.status = status
  keep(id, write(it))
  add_entry(status, id, it.whose, it.quantity, it.parts, it.epoch)
end

-- Stands for a record that cannot be read.
local UNREADABLE = { status = '?' }

-- The record of an operation. A reservation whose time is over expires first.
local function find(id)
  local record = records[id]
  if not record then
    return nil
  end
  local it = parse(record) or UNREADABLE
  if it.status == 'h' and it.expires <= now then
    close(id, it, 'e')
  end
  return it
end

-- Refuses everything under this id from now on.
local MAX_TOMBSTONES = 100000
local function write_tombstone(id)
  if head[TOMBSTONES] >= MAX_TOMBSTONES then
    return 'F'
  end
  head[TOMBSTONES] = head[TOMBSTONES] + 1
  local record = keep(id, 'q 0 0 0 ' .. now_text .. ' 0  ')
  add_entry('q', id, '', 0, '', 0)
  return record
end

