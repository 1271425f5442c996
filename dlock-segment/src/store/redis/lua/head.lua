-- What the scripts of an inventory share: its head. The rules are in store/mod.rs and
-- store/home/mod.rs; the scripts must do the same.
--
-- KEYS[1], <key>, is `dlock:2:{namespace:name}:i`. All keys of an inventory have the same
-- hash tag, so they are in one slot.
--   <key>       string of 64-bit words, big-endian: 32 words of head, then for N
--               segments N words each of available, reserved, sold, supplied
--   <key>t      string: the terms it was made with
--   <key>z      list: how many segments each epoch had
--   <key>o<g>   hash: records of generation g, by operation id; in a ring: of g modulo 4
--   <key>h      hash: records of open reservations, by operation id
--   <key>x      sorted set: when each of those expires
--   <key>b      hash: how many units each buyer has
--   <key>r      hash: what was given back of a purchase, by '<at> <operation id>'; lines of
--               the refund's id, quantity, time and status, separated by tabs
--   <key>d<b>   string: the inventory that was born at b was removed
--   <key>m      hash: s<h> all that was ever sent to home h, r<h> all that was received from it,
--               c<h> the latest change of h that a receipt has named
--   <key>j      stream: the journal; an entry for each batch, whose id is the number of its
--               last line
-- In a cluster, a slot may move while a script runs. Then a script must declare all keys, and
-- all of them must exist. So a home in a cluster (RING) has a field '' in each hash, a member
-- '' in the sorted set, and four hashes of records that are used in turn and never expire;
-- <key>e is a hash with nothing else, which replaces the records that are forgotten.
-- A record is status, quantity, refunded, epoch, at, expires, parts and whose, separated by
-- spaces; parts are segment:quantity, separated by commas. Statuses: t taken, h held,
-- c confirmed, x cancelled, e expired, r refund, g refund of damaged units, s restock,
-- w write-off, q tombstone, d debt. Times are in milliseconds; what expires of a refund is the time
-- of the purchase.

local LAYOUT, EPOCH, SEGMENTS, AVAILABLE, RESERVED, SOLD, INITIAL, RESTOCKED = 1, 2, 3, 4, 5, 6, 7, 8
local OPENS, CLOSES, PAUSED, PER_BUYER, RETENTION, JOURNAL, SEQUENCE = 9, 10, 11, 12, 13, 14, 15
local HOLDS, NEXT_EXPIRY, GENERATION, BEFORE, BIRTH, SOLD_BY_ID, CHANGES = 16, 17, 18, 19, 20, 21, 22
local TOMBSTONES, WRITTEN_OFF = 23, 24 -- tombstones of the generation that was written last
local SINCE, NUMBER = 25, 26 -- when the generation of this number began
local SENT, RECEIVED, INFLOW, LEASED, VERSION = 27, 28, 29, 30, 31 -- of several homes
-- The layout is 1, and what a client that does not know these must not touch.
local RING, OF_SEVERAL, COMPLETE = 256, 512, 1024
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
