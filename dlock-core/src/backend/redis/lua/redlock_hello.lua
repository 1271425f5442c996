-- hello: what a client wants to know of a node when it connects.
--
-- KEYS[1]  the marker  ARGV[1]  the longest ttl of this client, milliseconds  ARGV[2]  1 if
-- the node is new for sure and may vote at once if it has no marker, else 0  ARGV[3]  the
-- silence of a node that has lost its data, microseconds
-- Replies { run id, clock, since when the marker counts, longest ttl } in digits.

local run_id = match(call('INFO', 'server'), 'run_id:(%x+)')
if ARGV[2] == '1' and not call('GET', KEYS[1]) then
  call('SET', KEYS[1], run_id .. digits(now - tonumber(ARGV[3])) .. ARGV[1])
end
local id, since, longest = marker(KEYS[1], run_id, ARGV[1])
return { id, digits(now), digits(since), format('%.0f', longest) }
