-- What the scripts of an inventory share: its head. The rules are in store/mod.rs and
-- store/home/mod.rs; the scripts must do the same.
--
-- KEYS[1], <key>, is `dlock:2:{namespace:name}:i`. All keys of an inventory have the same
-- hash tag, so they are in one slot.
--   <key>       string of 64-bit words, big-endian: 32 words of head, then for N
--               segments N words each of available, reserved, sold, supplied
--   <key>t      string: the terms it was made with
--   <key>z      list: how many segments each epoch had
--   <key>o<g>   hash: records of generation g, by operation id
--   <key>h      hash: records of open reservations, by operation id
--   <key>x      sorted set: when each of those expires
--   <key>b      hash: how many units each buyer has
--   <key>d<b>   string: the inventory that was born at b was removed
--   <key>j      stream: the journal; an entry for each batch, whose id is the number of its
--               last line
-- A record is status, quantity, refunded, epoch, at, expires, parts and whose, separated by
-- spaces; parts are segment:quantity, separated by commas. Statuses: t taken, h held,
-- c confirmed, x cancelled, e expired, r refund, s restock, q tombstone. Times are in
-- milliseconds.

local LAYOUT, EPOCH, SEGMENTS, AVAILABLE, RESERVED, SOLD, INITIAL, RESTOCKED = 1, 2, 3, 4, 5, 6, 7, 8
local OPENS, CLOSES, PAUSED, PER_BUYER, RETENTION, JOURNAL, SEQUENCE = 9, 10, 11, 12, 13, 14, 15
local HOLDS, NEXT_EXPIRY, GENERATION, BEFORE, BIRTH, SOLD_BY_ID, CHANGES = 16, 17, 18, 19, 20, 21, 22
local TOMBSTONES = 23 -- of the generation that was written last
local WORDS = 32
local FORMAT = '>' .. string.rep('i8', WORDS)

local key = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

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
  if head[LAYOUT] ~= 1 then
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

-- Each inventory has a phase of its own, so that the records of many inventories do not end
-- at the same moment.
local function phase(head)
  return head[BIRTH] % 8191 * math.floor(head[RETENTION] / 8191)
end

-- The number of the generation at this time.
local function generation_of(head)
  return math.floor((now + phase(head)) / head[RETENTION])
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
