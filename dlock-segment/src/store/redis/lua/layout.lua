-- What the scripts of an inventory share: where its numbers are, and the time. The rules are
-- in store/mod.rs and store/home/mod.rs; the scripts must do the same.
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

