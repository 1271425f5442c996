-- Reads the head and the counts of the segments.
-- ARGV: birth
-- Reply: the view and the segments' words, or 'N' if there is no such inventory ('R' if
-- it was removed).

local head = load_head(ARGV[1])
if not head then
  return missing(ARGV[1])
end
return { view(head), redis.call('GETRANGE', key, WORDS * 8, -1) }
