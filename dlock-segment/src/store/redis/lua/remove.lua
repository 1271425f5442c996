-- Deletes an inventory.
-- ARGV: birth
-- Reply: 1 if there was one, else 0.

local head = load_head(ARGV[1])
if not head then
  return 0
end
redis.call('UNLINK', key, key .. 't', key .. 'z', key .. 'h', key .. 'x', key .. 'b', key .. 'j', key .. 'r',
  key .. 'm', records_of(head, head[GENERATION]), records_of(head, head[BEFORE]))
if has_flag(head, RING) then
  redis.call('UNLINK', key .. 'e', key .. 'o0', key .. 'o1', key .. 'o2', key .. 'o3')
end
-- For a day, whoever knows this inventory is told that it was removed, not lost.
redis.call('SET', key .. 'd' .. ARGV[1], '1', 'PX', 86400000)
return 1
