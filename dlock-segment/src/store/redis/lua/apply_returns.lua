-- Units that come back from a buyer, and units that leave the inventory unsold.

-- The answer to a request under an id that has a record.
local function again(it, statuses, quantity, whose)
  if it.status == 'q' or it.status == '?' or (string.find(statuses, it.status, 1, true)
      and it.quantity == quantity and it.whose == whose) then
    return write(it)
  end
  return 'C'
end

local function is_refund(kind)
  return kind == 'r' or kind == 'g'
end

-- What was given back of each purchase, and which of them must be written.
local returns, returns_kept = {}, {}

-- An id may be used again after the retention, so the time belongs to the purchase.
local function purchase(of, at)
  return at .. ' ' .. of
end

local function load_returns(purchases)
  for from = 1, #purchases, 4000 do
    local last = math.min(from + 3999, #purchases)
    local found = redis.call('HMGET', key .. 'r', unpack(purchases, from, last))
    for n = from, last do
      returns[purchases[n]] = found[n - from + 1] or ''
    end
  end
end

-- The returns to be written: fields and values in turn.
local function changed_returns()
  local list = {}
  for field in pairs(returns_kept) do
    local n = #list
    list[n + 1], list[n + 2] = field, returns[field]
  end
  return list
end

-- Takes sold units out of the inventory; `as` counts them.
local function take_out(of_epoch, parts, total, as)
  for segment, quantity in string.gmatch(parts, '(%d+):(%d+)') do
    local i = place(of_epoch, tonumber(segment))
    add(3, i, -tonumber(quantity))
    add(4, i, -tonumber(quantity))
  end
  head[SOLD] = head[SOLD] - total
  head[as] = head[as] + total
end

-- Whether so many units of these segments are sold.
local function are_sold(of_epoch, parts)
  local sums = {}
  for segment, quantity in string.gmatch(parts, '(%d+):(%d+)') do
    local i = place(of_epoch, tonumber(segment))
    sums[i] = (sums[i] or 0) + tonumber(quantity)
    local from = (WORDS + 2 * segments + i) * 8
    local sold = struct.unpack('>i8', redis.call('GETRANGE', key, from, from + 7))
    if sold + (deltas[3][i] or 0) < sums[i] then
      return false
    end
  end
  return true
end

-- The answer if there is a record under the id of a refund. It must be of the same purchase,
-- if that is known.
local function refunded_again(it, status, quantity, of, bought_at)
  if it.status == status and bought_at and text(it.expires) ~= bought_at then
    return 'C'
  end
  return again(it, status, quantity == 0 and it.quantity or quantity, of)
end

local function refund(status, quantity, id, of, receipt)
  local before, recorded = find(id), find(of)
  local bought, is_late = recorded, false
  if receipt ~= '' and not (recorded and recorded.at == string.match(receipt, '^%a %d+ %d+ %d+ (%d+) ')) then
    bought, is_late = parse(receipt), true
  end
  if before then
    return refunded_again(before, status, quantity, of, bought and bought.at)
  elseif not bought then
    return is_late and 'N' or 'A'
  elseif bought.status == '?' then
    return 'U'
  elseif string.find('xeq', bought.status, 1, true) then
    return 'T0'
  elseif bought.status ~= 't' and bought.status ~= 'c' then
    return 'C'
  end
  local field, given = purchase(of, bought.at), 0
  local lines_before = returns[field] or ''
  for earlier, many, at, as in string.gmatch(lines_before, '([^\t\n]+)\t(%d+)\t(%d+)\t(%a)') do
    if earlier == id then
      local it = {
        status = as, quantity = tonumber(many), refunded = 0, epoch = bought.epoch, at = at,
        expires = tonumber(bought.at), parts = cut(bought.parts, given, tonumber(many)), whose = of,
      }
      return refunded_again(it, status, quantity, of)
    end
    given = given + tonumber(many)
  end
  given = math.max(given, bought.refunded)
  local left = math.max(0, bought.quantity - given)
  if quantity == 0 then
    quantity = left
  end
  if left == 0 or quantity > left then
    return 'T' .. left
  end
  local parts = cut(bought.parts, given, quantity)
  if is_late and (head[SOLD_BY_ID] < quantity or not are_sold(bought.epoch, parts)) then
    return 'N'
  end
  if status == 'g' then
    take_out(bought.epoch, parts, quantity, WRITTEN_OFF)
  else
    move_parts(bought.epoch, parts, 3, 1)
  end
  head[SOLD_BY_ID] = head[SOLD_BY_ID] - quantity
  if bought.whose ~= '' then
    buyer_has(bought.whose, -quantity)
  end
  local returned = id .. '\t' .. quantity .. '\t' .. now_text .. '\t' .. status
  returns[field] = lines_before == '' and returned or lines_before .. '\n' .. returned
  returns_kept[field] = true
  -- The id of a purchase that is forgotten is free for its record again.
  if not (is_late and recorded) then
    bought.refunded = given + quantity
    keep(of, write(bought))
  end
  add_entry(status, id, of, quantity, parts, bought.epoch)
  return keep(id, write({
    status = status, quantity = quantity, refunded = 0, epoch = bought.epoch, at = now_text,
    expires = tonumber(bought.at), parts = parts, whose = of,
  }))
end

