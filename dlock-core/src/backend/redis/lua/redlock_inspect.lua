-- inspect: a key at one node of a quorum.
--
-- KEYS[1]  the key
-- Replies the mark of the lease or '', its first token, microseconds since it began and until
-- it ends, its holder, and then for each waiter owner, microseconds since it waits, holder.

local state = load(KEYS[1])
local reply = { '', 0, 0, 0, '' }
if is_held(state) then
  reply = { state.mark, tonumber(state.first), now - tonumber(state.since), state.ends - now, state.info }
end
state.waits = '1'
for _, waiter in ipairs(waiters(state, '')) do
  reply[#reply + 1] = waiter.owner
  reply[#reply + 1] = now - waiter.since
  reply[#reply + 1] = waiter.info
end
return reply
