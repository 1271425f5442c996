-- inspect: who has a lock in the layout of Redisson, and which clients of dlock wait.
--
-- KEYS  the lock, what dlock knows besides, and who waits (see redisson_calls.lua)
-- Replies { clock in microseconds, milliseconds until the lease ends, the string of dlock or
-- '', the fields of the lock, what is known of each who waits }.
local time = redis.call('TIME')
return { time[1] * 1000000 + time[2], redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) or '',
  redis.call('HKEYS', KEYS[1]), redis.call('HVALS', KEYS[3]) }
