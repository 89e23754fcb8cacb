-- Requests read under an older policy are stale from now on. Known before there are counters, too: seeding keeps it.
-- ARGV: policy epoch. Returns the newest; it never becomes smaller.

local newest = math.max(policy or 0, tonumber(ARGV[1]))
redis.call('HSET', state_key, 'policy', newest)
if not epoch then
  redis.call('EXPIRE', state_key, STATE_LIFE)
end
return newest
