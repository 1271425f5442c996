-- Makes an inventory, or finds the one that there is.
-- ARGV: terms as one string, stock, segments, per buyer, opens, closes, retention, journal,
-- flags of the layout
-- Reply: the view, and the terms that it was made with.

local refused = missing_right(ARGV[9] % 512 >= RING)
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
head[LAYOUT], head[SEGMENTS], head[AVAILABLE], head[INITIAL] = 1 + ARGV[9], segments, stock, stock
head[PER_BUYER], head[OPENS], head[CLOSES] = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
head[RETENTION], head[JOURNAL] = tonumber(ARGV[7]), tonumber(ARGV[8])
head[BIRTH] = time[1] * 1000000 + time[2]
-- Each inventory has a phase of its own, so that the records of many inventories do not end
-- at the same moment.
local phase = head[BIRTH] % 8191 * math.floor(head[RETENTION] / 8191)
head[SINCE], head[NUMBER] = now + 1 + phase, 2
-- Delete what may be left of an inventory whose head was lost.
redis.call('UNLINK', key .. 'z', key .. 'h', key .. 'x', key .. 'b', key .. 'j',
  key .. 'r', key .. 'm', key .. 'e', key .. 'o0', key .. 'o1', key .. 'o2', key .. 'o3')
local available = words(shares(stock, segments))
local none = string.rep('\0', segments * 16)
redis.call('SET', key, pack_head(head) .. available .. none .. available)
redis.call('SET', key .. 't', ARGV[1])
redis.call('RPUSH', key .. 'z', text(segments))
if has_flag(head, RING) then
  for hash in string.gmatch('e h b r m o0 o1 o2 o3', '%S+') do
    put_placeholder(key .. hash)
  end
  redis.call('ZADD', key .. 'x', '9007199254740992', '')
  redis.call('XADD', key .. 'j', 'MAXLEN', '0', '0-1', 'l', '')
end
return { view(head), ARGV[1] }
