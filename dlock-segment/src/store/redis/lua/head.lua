-- What the scripts of an inventory share: functions on its head.

-- A number as a string, exactly. Many numbers of a batch are equal, so the strings are kept.
local texts = {}
local function text(number)
  local found = texts[number]
  if not found then
    found = string.format('%.0f', number)
    texts[number] = found
  end
  return found
end

-- The head, or nil if there is no such inventory. A birth of 0 means any.
local function load_head(birth)
  local raw = redis.call('GETRANGE', key, 0, WORDS * 8 - 1)
  if #raw < WORDS * 8 then
    return nil
  end
  local head = { struct.unpack(FORMAT, raw) }
  if head[LAYOUT] % 256 ~= 1 or head[LAYOUT] >= 2048 then
    error('DLOCKLAYOUT')
  end
  if birth ~= '0' and text(head[BIRTH]) ~= birth then
    return nil
  end
  return head
end

-- What is answered if there is no such inventory: 'R' if it was removed, else 'N'.
local function missing(birth)
  return birth ~= '0' and redis.call('GET', key .. 'd' .. birth) and 'R' or 'N'
end

local function pack_head(head)
  return struct.pack(FORMAT, unpack(head, 1, WORDS))
end

-- The head as the client reads it: packed, with the time in its last word.
local function view(head)
  head[WORDS] = now
  return pack_head(head)
end

-- The number of the generation at this time. The first is 1; store/generations.rs says more.
local function generation_of(head)
  return math.max(1, head[NUMBER] + math.floor((now - head[SINCE]) / head[RETENTION]))
end

local function has_flag(head, flag)
  return math.floor(head[LAYOUT] / flag) % 2 == 1
end

-- The hash of the records of a generation.
local function records_of(head, generation)
  return key .. 'o' .. text(has_flag(head, RING) and generation % 4 or generation)
end

-- Makes what keeps a hash in existence.
local function put_placeholder(hash)
  redis.call('HSET', hash, '', '')
end

-- Before a generation is written to for the first time: in a ring, only the records of the
-- one before it are kept.
local function turn_ring(head, generation)
  for at = 0, 3 do
    if head[GENERATION] ~= generation - 1 or at ~= head[GENERATION] % 4 then
      -- In one step: a key that does not exist cannot be made again while its slot moves.
      redis.call('COPY', key .. 'e', key .. 'o' .. at, 'REPLACE')
    end
  end
end

-- When the first reservation expires; 0 if there is none.
local function first_expiry()
  local first = redis.call('ZRANGE', key .. 'x', 0, 0, 'WITHSCORES')
  return (first[1] or '') ~= '' and tonumber(first[2]) or 0
end

-- Sets when the server deletes the records of a generation: one retention after the end of
-- the time in which they are found.
local function expire_generation(head, generation)
  if has_flag(head, RING) then
    return
  end
  local at = head[SINCE] + (generation - head[NUMBER] + 3) * head[RETENTION]
  redis.call('PEXPIREAT', records_of(head, generation), text(at))
end

-- One line of the journal.
local now_text = text(now)
local function line(effect, operation, whose, quantity, parts, epoch)
  return effect .. '\t' .. operation .. '\t' .. whose .. '\t' .. quantity .. '\t' .. parts
    .. '\t' .. epoch .. '\t' .. now_text
end

-- Writes lines to the journal and counts them.
local function write_journal(head, lines)
  head[SEQUENCE] = head[SEQUENCE] + #lines
  local last = head[SEQUENCE]
  redis.call('XADD', key .. 'j', 'MINID', '~', text(math.max(0, last - head[JOURNAL])),
    text(last) .. '-0', 'l', table.concat(lines, '\n'))
end

-- Packs numbers as 64-bit words, for a range of segments.
local function words(numbers)
  local packed = {}
  for i = 1, #numbers do
    packed[i] = struct.pack('>i8', numbers[i])
  end
  return table.concat(packed)
end

-- The share of each of N segments in a total.
local function shares(total, segments)
  local each = math.floor(total / segments)
  local odd = total - each * segments
  local split = {}
  for i = 1, segments do
    split[i] = each + (i <= odd and 1 or 0)
  end
  return split
end
