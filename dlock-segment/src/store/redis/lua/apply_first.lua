-- Applies a batch of requests to an inventory. The number of server calls does not depend
-- on the size of the batch: everything is read first, worked out in tables, and written at
-- the end.
-- ARGV[1]  birth
-- ARGV[2]  the segment to begin with: any number
-- ARGV[3]  msgpack: { runs, named, items }
--          runs: quantity, count, ... of deductions without id or buyer
--          named: quantity, { id, ... }, ... of deductions without buyer; no id comes twice
--          items: kind, quantity, id, whose, extra, ... with the kinds d deduct,
--          h reserve (extra: how long it lasts), c confirm, p confirm some units, x cancel, e extend (extra: until
--          when), r refund and g refund of damaged units (whose: the refunded operation; extra:
--          the record that it had, or an empty string), s restock, w write off, q resolve,
--          a when the next item was placed (quantity: the time; it has no answer), l look, n a deduction that was lost (extra: 1 if it may become a debt), o send to another home (extra: the home, and what was ever sent to it),
--          i receive (quantity: all that the home ever sent; extra: the home, and its change)
-- Reply: 'N' if there is no such inventory ('R' if it was removed), else the view and lines:
--   for each run: the number of deductions done, the refusal of the others, the parts;
--   for each list of ids: a count and the answer that so many ids share, ..., separated by
--   tabs;
--   for each item: its answer.
--   An answer is a record or a letter: A absent, S and what is
--   available: sold out, L limit reached, B before it
--   opens, E ended, P paused, C conflict, M buyer missing, T and what is left: too much,
--   V and two numbers: moved, N not sold, Y placed too long ago, O overflow, F too many tombstones, G again, U its record cannot be read

local head = load_head(ARGV[1])
if not head then
  return missing(ARGV[1])
end
local items = batch[3]
local FIELDS = 5
local MAX_UNITS = 9007199254740992
local MAX_RECLAIMED = 256

local segments, epoch = head[SEGMENTS], head[EPOCH]
local start = tonumber(ARGV[2]) % segments
local changed, lines = false, {}
local journalling = head[JOURNAL] > 0
local epoch_text = text(epoch)

local function add_entry(effect, id, whose, quantity, parts, of_epoch)
  changed = true
  if journalling then
    lines[#lines + 1] = line(effect, id, whose, quantity, parts, of_epoch)
  end
end

