-- Makes an inventory, or finds the one that there is.
-- ARGV: terms as one string, stock, segments, per buyer, opens, closes, retention, journal
-- Reply: the view, and the terms that it was made with.

local refused = missing_right()
if refused then
  return refused
end
local head = load_head('0')
if head then
  return { view(head), redis.call('GET', key .. 't') }
end

head = {}
for i = 1, WORDS do
  head[i] = 0
end
local stock, segments = tonumber(ARGV[2]), tonumber(ARGV[3])
head[LAYOUT], head[SEGMENTS], head[AVAILABLE], head[INITIAL] = 1, segments, stock, stock
head[PER_BUYER], head[OPENS], head[CLOSES] = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
head[RETENTION], head[JOURNAL] = tonumber(ARGV[7]), tonumber(ARGV[8])
head[BIRTH] = time[1] * 1000000 + time[2]
-- Delete what may be left of an inventory whose head was lost.
local generation = generation_of(head)
redis.call('UNLINK', key .. 'z', key .. 'h', key .. 'x', key .. 'b', key .. 'j',
  key .. 'o' .. text(generation), key .. 'o' .. text(generation - 1))
local available = words(shares(stock, segments))
local none = string.rep('\0', segments * 16)
redis.call('SET', key, pack_head(head) .. available .. none .. available)
redis.call('SET', key .. 't', ARGV[1])
redis.call('RPUSH', key .. 'z', text(segments))
return { view(head), ARGV[1] }
