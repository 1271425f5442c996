-- Opens an inventory.
-- Reply: the view, or 'N' if there is no such inventory.

local head = load_head('0')
if not head then
  return 'N'
end
return missing_right() or view(head)
