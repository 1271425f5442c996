-- The whole head with its segments.
-- ARGV: birth
-- Reply: the view and the segments' words, or 'N' if there is no such sale.

local head = load_head(ARGV[1])
if not head then
  return 'N'
end
return { view(head), redis.call('GETRANGE', key, WORDS * 8, -1) }
