-- apply, the short way: deductions of one quantity, all without an id or all with new ones,
-- that the first segment can serve. Most batches of a sale are such. What is not done here is
-- left to what follows, which would do the same, but first makes all its functions anew:
-- that takes longer than all the rest of a small batch.
local batch = cmsgpack.unpack(ARGV[3]) -- described in apply_first.lua
local runs, named = batch[1], batch[2]
local raw = #batch[3] == 0 and #runs + #named == 2 and redis.call('GETRANGE', key, 0, WORDS * 8 - 1)
if raw and #raw == WORDS * 8 then
  local head = { struct.unpack(FORMAT, raw) }
  local ids = named[2]
  local quantity, count = runs[1] or named[1], ids and #ids or runs[2]
  local total, generation = quantity * count, head[GENERATION]
  local segment = ARGV[2] % head[SEGMENTS]
  local from = (WORDS + segment) * 8
  local is_usual = head[LAYOUT] % 256 == 1 and head[LAYOUT] < 2048
    and (ARGV[1] == '0' or string.format('%.0f', head[BIRTH]) == ARGV[1])
    and head[PAUSED] == 0 and now >= head[OPENS] and (head[CLOSES] == 0 or now < head[CLOSES])
    and head[PER_BUYER] == 0 and head[JOURNAL] == 0 and head[HOLDS] == 0
    and head[NEXT_EXPIRY] == 0 and head[AVAILABLE] >= total
    and struct.unpack('>i8', redis.call('GETRANGE', key, from, from + 7)) >= total
  local records
  if is_usual and ids then
    local ring = math.floor(head[LAYOUT] / RING) % 2 == 1
    local newest = math.max(1, head[NUMBER] + math.floor((now - head[SINCE]) / head[RETENTION]))
    is_usual = newest == generation
    for _, period in ipairs({ generation, head[BEFORE] }) do
      if is_usual and period ~= 0 and period >= newest - 1 then
        local hash = key .. 'o' .. string.format('%.0f', ring and period % 4 or period)
        records = records or hash
        local found = redis.call('HMGET', hash, unpack(ids))
        for n = 1, count do
          if found[n] then
            is_usual = false
            break
          end
        end
      end
    end
  end
  if is_usual then
    local place, reply = string.format('%.0f', segment), nil
    if ids then
      local record = 't ' .. quantity .. ' 0 ' .. string.format('%.0f %.0f', head[EPOCH], now)
        .. ' 0 ' .. place .. ':' .. quantity .. ' '
      local kept = {}
      for n = 1, count do
        kept[2 * n - 1], kept[2 * n] = ids[n], record
      end
      reply, ids = count .. ' ' .. record, kept
      head[SOLD_BY_ID] = head[SOLD_BY_ID] + total
    else
      reply = count .. ' - ' .. place .. ':' .. total
    end
    head[AVAILABLE], head[SOLD] = head[AVAILABLE] - total, head[SOLD] + total
    head[CHANGES] = head[CHANGES] + 1
    head[WORDS] = now
    local view, units = struct.pack(FORMAT, unpack(head, 1, WORDS)), string.format('%.0f', total)
    redis.call('BITFIELD', key, 'INCRBY', 'i64', '#' .. WORDS + segment, '-' .. units,
      'INCRBY', 'i64', '#' .. WORDS + 2 * head[SEGMENTS] + segment, units)
    if ids then
      redis.call('HSET', records, unpack(ids))
    end
    redis.call('SETRANGE', key, 0, view)
    return { view, reply }
  end
end

