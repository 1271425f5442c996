-- Applies the batch. Its arguments and its reply are described in apply_first.lua.

---------------------------------------------------------------- reading
local expired, more_expired = {}, false
if head[NEXT_EXPIRY] ~= 0 and head[NEXT_EXPIRY] <= now then
  expired = redis.call('ZRANGEBYSCORE', key .. 'x', '-inf', now_text, 'LIMIT', 0, MAX_RECLAIMED + 1)
  if #expired > MAX_RECLAIMED then
    more_expired = true
    expired[#expired] = nil
  end
end

local wanted, ids, buyers = {}, {}, {}
local function want(list, id)
  if id ~= '' and not wanted[id] then
    wanted[id] = true
    list[#list + 1] = id
  end
end
for n = 1, #items, FIELDS do
  want(ids, items[n + 2])
  if is_refund(items[n]) then
    want(ids, items[n + 3])
  end
end
for _, id in ipairs(expired) do
  want(ids, id)
end
look_up(ids)
local names = named[2] or {}
if #named > 2 then
  names = {}
  for n = 2, #named, 2 do
    for _, id in ipairs(named[n]) do
      names[#names + 1] = id
    end
  end
end
local any_known = look_up(names)

-- The buyers whose counts are needed: those who buy, whose reservations end here, and whose
-- units are refunded. With refunds, also what was given back before.
wanted = {}
local purchases = {}
for n = 1, #items, FIELDS do
  if is_refund(items[n]) then
    local of, receipt = items[n + 3], items[n + 4]
    for _, record in ipairs({ records[of] or '', receipt }) do
      local it = parse(record)
      if it then
        want(buyers, it.whose)
        purchases[#purchases + 1] = purchase(of, it.at)
      end
    end
  else
    want(buyers, items[n + 3])
  end
end
load_returns(purchases)
for _, id in ipairs(seen) do
  local status = string.sub(records[id], 1, 1)
  if status == 'h' or status == 't' or status == 'c' then
    want(buyers, (parse(records[id]) or { whose = '' }).whose)
  end
end
if #buyers > 0 then
  local found = redis.call('HMGET', key .. 'b', unpack(buyers))
  for n, buyer in ipairs(buyers) do
    has[buyer] = tonumber(found[n] or 0)
  end
end

---------------------------------------------------------------- working
local overdue = {}
for _, id in ipairs(expired) do
  local it = find(id)
  if it == UNREADABLE then -- an audit reports it; here it must not come up again and again
    overdue[#overdue + 1], changed = id, true
  elseif not is_hold[id] and not unhold[id] then -- only its expiry time was left
    unhold[id], changed = true, true
  end
end

-- The answer if more is asked for than is available.
local function shortage()
  return more_expired and 'G' or 'S' .. text(head[AVAILABLE])
end

-- Why this quantity cannot be taken for this buyer; nil if it can.
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
    elseif has[buyer] + quantity > limit then
      return more_expired and quantity <= limit and 'G' or 'L'
    end
  end
  if head[AVAILABLE] < quantity then
    return shortage()
  end
end

local starts = {}
local function taken(status, quantity, id, buyer, expires)
  local parts = take(quantity, status == 'h' and 2 or 3)
  if buyer ~= '' then
    buyer_has(buyer, quantity)
  end
  changed = true
  if journalling then
    add_entry(status, id, buyer, quantity, parts, epoch_text)
  end
  local start_of = starts[quantity]
  if not start_of then
    start_of = ' ' .. quantity .. ' 0 ' .. epoch_text .. ' ' .. now_text .. ' '
    starts[quantity] = start_of
  end
  return status .. start_of .. expires .. ' ' .. parts .. ' ' .. buyer
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
  return record
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
  return keep(id, taken('h', quantity, id, buyer, text(expires)), expires)
end

local function close_by(id, status)
  local it = find(id)
  if not it then
    return status == 'x' and write_tombstone(id) or 'A'
  elseif it.status == 'h' then
    close(id, it, status)
  elseif not string.find('cxeq?', it.status, 1, true) then
    return 'C'
  end
  return write(it)
end

function act.c(_, id)
  return close_by(id, 'c')
end

function act.p(quantity, id)
  local it = find(id)
  if not it then
    return 'A'
  elseif it.status ~= 'h' then
    return string.find('cxeq?', it.status, 1, true) and write(it) or 'C'
  elseif quantity > it.quantity then
    return 'T' .. it.quantity
  elseif quantity == 0 then
    close(id, it, 'x')
    return write(it)
  end
  local rest = it.quantity - quantity
  if rest > 0 then
    local back = cut(it.parts, quantity, rest)
    move_parts(it.epoch, back, 2, 1)
    if it.whose ~= '' then
      buyer_has(it.whose, -rest)
    end
    add_entry('x', '', it.whose, rest, back, it.epoch)
  end
  it.parts, it.quantity = cut(it.parts, 0, quantity), quantity
  close(id, it, 'c')
  return write(it)
end

function act.x(_, id)
  return close_by(id, 'x')
end

function act.e(_, id, _, until_then)
  local it = find(id)
  if not it then
    return 'A'
  elseif it.status == 'h' then
    if until_then > it.expires then
      it.expires = until_then
      keep(id, write(it), until_then)
      add_entry('m', id, it.whose, it.quantity, it.parts, it.epoch)
    end
  elseif not string.find('cxeq?', it.status, 1, true) then
    return 'C'
  end
  return write(it)
end

function act.r(quantity, id, of, receipt)
  return refund('r', quantity, id, of, receipt)
end

function act.g(quantity, id, of, receipt)
  return refund('g', quantity, id, of, receipt)
end

function act.w(quantity, id)
  local it = find(id)
  if it then
    return again(it, 'w', quantity, '')
  elseif head[AVAILABLE] < quantity then
    return shortage()
  end
  local parts = take(quantity, 3)
  take_out(epoch, parts, quantity, WRITTEN_OFF)
  add_entry('w', id, '', quantity, parts, epoch_text)
  return keep(id, write({
    status = 'w', quantity = quantity, refunded = 0, epoch = epoch_text, at = now_text,
    expires = 0, parts = parts, whose = '',
  }))
end

function act.s(quantity, id)
  local it = id ~= '' and find(id)
  if it then
    return again(it, 's', quantity, '')
  end
  if head[INITIAL] + head[RESTOCKED] + quantity >= MAX_UNITS then
    return 'O'
  end
  local parts = supply(quantity)
  head[RESTOCKED] = head[RESTOCKED] + quantity
  add_entry('s', id, '', quantity, parts, epoch_text)
  local record = 's ' .. quantity .. ' 0 ' .. epoch_text .. ' ' .. now_text .. ' 0  '
  return id ~= '' and keep(id, record) or record
end

function act.q(_, id)
  local it = find(id)
  return it and write(it) or write_tombstone(id)
end

function act.l(_, id)
  local it = find(id)
  return it and write(it) or 'A'
end

function act.n(quantity, id, buyer, or_debt)
  local it = find(id)
  if it and string.find('tc?', it.status, 1, true) then
    return write(it)
  elseif it and not string.find('xeqd', it.status, 1, true) then
    return 'C'
  elseif head[AVAILABLE] < quantity then
    if or_debt ~= 1 or more_expired then
      return shortage()
    elseif it and it.status == 'd' then
      return write(it)
    end
    add_entry('d', id, buyer, quantity, '', epoch_text)
    return keep(id, write({
      status = 'd', quantity = quantity, refunded = 0, epoch = epoch_text, at = now_text,
      expires = 0, parts = '', whose = buyer,
    }))
  end
  head[SOLD_BY_ID] = head[SOLD_BY_ID] + quantity
  return keep(id, taken('t', quantity, id, buyer, '0'))
end

function act.o(quantity, _, _, extra)
  return send_units(quantity, extra)
end

function act.i(total, _, _, extra)
  return receive_units(total, extra)
end

-- Deductions without id or buyer, as many at a time as one segment can serve.
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
      add_entry('t', '', '', some * quantity, parts[#parts], epoch_text)
      done = done + some
    else
      parts[#parts + 1] = take(quantity, 3)
      add_entry('t', '', '', quantity, parts[#parts], epoch_text)
      done = done + 1
    end
  end
  return done .. ' - ' .. table.concat(parts, ',')
end

local reply = {}
for n = 1, #runs, 2 do
  reply[#reply + 1] = run(runs[n], runs[n + 1])
end

-- Deductions of one quantity without a buyer. New ids that one segment serves have the same
-- record, so it is made once and answered once.
local function buy(quantity, ids)
  local answers, alike, last_answer = {}, 0, nil
  local function answer(count, with)
    if with ~= last_answer then
      if last_answer then
        answers[#answers + 1] = alike .. ' ' .. last_answer
      end
      alike, last_answer = 0, with
    end
    alike = alike + count
  end
  local n, count = 1, #ids
  while n <= count do
    local is_new = not (any_known and records[ids[n]])
    local refused = is_new and refusal(quantity, '')
    local here = is_new and not refused and single_with(quantity)
    if refused then
      answer(1, refused)
      n = n + 1
    elseif here then
      local from = part(here, quantity)
      local record = 't ' .. quantity .. ' 0 ' .. epoch_text .. ' ' .. now_text .. ' 0 ' .. from .. ' '
      local first, last = n, math.min(count, n - 1 + math.floor(units(here) / quantity))
      local kept, k = kept, #kept
      while n <= last do
        local id = ids[n]
        if any_known and records[id] then
          break
        end
        kept[k + 1], kept[k + 2] = id, record
        k, n = k + 2, n + 1
      end
      if #items > 0 then
        for at = first, n - 1 do
          records[ids[at]] = record
        end
      end
      if journalling then
        local rest = string.sub(line('t', '', '', quantity, from, epoch_text), 3)
        for at = first, n - 1 do
          lines[#lines + 1] = 't\t' .. ids[at] .. rest
        end
      end
      changed = true
      move(here, (n - first) * quantity, 1, 3)
      head[SOLD_BY_ID] = head[SOLD_BY_ID] + (n - first) * quantity
      answer(n - first, record)
    else
      answer(1, act.d(quantity, ids[n], ''))
      n = n + 1
    end
  end
  answer(0, nil)
  return table.concat(answers, '\t')
end

for n = 1, #named, 2 do
  reply[#reply + 1] = buy(named[n], named[n + 1])
end
-- Since when every record is found; 0 if none is forgotten.
local function remembered_since()
  local oldest = generation - 1
  return oldest <= 1 and 0 or head[SINCE] + math.max(0, oldest - head[NUMBER]) * head[RETENTION]
end

local placed
for n = 1, #items, FIELDS do
  local kind, id = items[n], items[n + 2]
  if kind == 'a' then
    placed = items[n + 1]
  else
    local is_late = placed and id ~= '' and not find(id) and placed < remembered_since()
    placed = nil
    reply[#reply + 1] = is_late and 'Y' or act[kind](items[n + 1], id, items[n + 3], items[n + 4])
  end
end

---------------------------------------------------------------- writing
if not changed then
  if #expired == 0 and head[NEXT_EXPIRY] ~= 0 and head[NEXT_EXPIRY] <= now then
    -- An expiry is due that the sorted set does not have: the set was lost.
    head[NEXT_EXPIRY] = first_expiry()
    redis.pcall('SETRANGE', key, 0, pack_head(head)) -- if the server is out of memory, the next call does it
  end
  return { view(head), table.concat(reply, '\n') }
end

-- Makes a call with many arguments in pieces that fit on Lua's stack.
local function call_with(command, hash, list)
  for from = 1, #list, 4000 do
    redis.call(command, hash, unpack(list, from, math.min(from + 3999, #list)))
  end
end

local gone, holds, expiries = {}, {}, {}
for id in pairs(unhold) do
  gone[#gone + 1] = id
end
for id, expires in pairs(held) do
  local n = #holds
  holds[n + 1], holds[n + 2] = id, records[id]
  expiries[n + 1], expiries[n + 2] = text(expires), id
end
-- Deletions come first: a server that is out of memory only checks the first write.
call_with('HDEL', key .. 'h', gone)
call_with('ZREM', key .. 'x', gone)
call_with('ZREM', key .. 'x', overdue)

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
call_with('HSET', key .. 'h', holds)
call_with('ZADD', key .. 'x', expiries)
if #gone + #overdue + #expiries > 0 then
  head[NEXT_EXPIRY] = first_expiry()
end
if #kept > 0 then
  local fresh = generation > head[GENERATION]
  if fresh then
    if has_flag(head, RING) then
      turn_ring(head, generation)
    end
    head[BEFORE], head[GENERATION] = head[GENERATION], generation
  end
  call_with('HSET', records_of(head, head[GENERATION]), kept)
  if fresh then
    expire_generation(head, generation)
  end
end
call_with('HSET', key .. 'r', changed_returns())
call_with('HSET', key .. 'm', changed_counters())
local without, with = {}, {}
for buyer in pairs(buyers_changed) do
  if has[buyer] == 0 then
    without[#without + 1] = buyer
  else
    local n = #with
    with[n + 1], with[n + 2] = buyer, text(has[buyer])
  end
end
call_with('HDEL', key .. 'b', without)
call_with('HSET', key .. 'b', with)
if #lines > 0 then
  write_journal(head, lines)
end
head[CHANGES] = head[CHANGES] + 1
local viewed = view(head)
redis.call('SETRANGE', key, 0, viewed)
return { viewed, table.concat(reply, '\n') }
