-- Reads the head and the counts of the segments.
-- ARGV: birth
-- Reply: the view and the segments' words, or 'N' if there is no such inventory.

local head = load_head(ARGV[1])
if not head then
  return 'N'
end
return { view(head), redis.call('GETRANGE', key, WORDS * 8, -1) }
