-- Opens an inventory.
-- ARGV: birth, or 0 for any
-- Reply: the view, or 'N' if there is no such inventory ('R' if it was removed).

local head = load_head(ARGV[1])
if not head then
  return missing(ARGV[1])
end
return missing_right(has_flag(head, RING)) or view(head)
