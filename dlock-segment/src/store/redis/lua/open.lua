-- Finds a sale.
-- Reply: the view, or 'N' if there is no such sale.

local head = load_head('0')
if not head then
  return 'N'
end
return missing_right() or view(head)
