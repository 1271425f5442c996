-- Units that move between the homes of a sale; the rules are in store/mod.rs.

-- The counters for each other home, and which of them must be written.
local counters, counters_changed = {}, {}
local function counter(field)
  counters[field] = counters[field] or tonumber(redis.call('HGET', key .. 'm', field) or 0)
  return counters[field]
end

local function set_counter(field, value)
  counters[field], counters_changed[field] = value, true
end

-- The counters to be written: fields and values in turn.
local function changed_counters()
  local list = {}
  for field in pairs(counters_changed) do
    local n = #list
    list[n + 1], list[n + 2] = field, text(counters[field])
  end
  return list
end

local function moved(total, seen)
  return 'V' .. text(total) .. ' ' .. text(seen)
end

local function send_units(quantity, extra)
  local to, after = string.match(extra, '^(%d+) (%d+)$')
  local sent = counter('s' .. to)
  quantity = math.min(quantity, head[AVAILABLE])
  if sent ~= tonumber(after) or quantity == 0 then
    return moved(sent, 0)
  end
  local parts = take(quantity, 3)
  take_out(epoch, parts, quantity, SENT)
  set_counter('s' .. to, sent + quantity)
  add_entry('o', '', to, quantity, parts, epoch_text)
  return moved(sent + quantity, 0)
end

local function receive_units(total, extra)
  local from, seen = string.match(extra, '^(%d+) (%d+)$')
  local received, latest = counter('r' .. from), counter('c' .. from)
  if total <= received then
    return moved(received, latest)
  elseif total >= MAX_UNITS then
    return 'O'
  end
  local parts = supply(total - received)
  head[RECEIVED] = head[RECEIVED] + total - received
  latest = math.max(latest, tonumber(seen))
  set_counter('r' .. from, total)
  set_counter('c' .. from, latest)
  add_entry('i', '', from, text(total - received), parts, epoch_text)
  return moved(total, latest)
end

