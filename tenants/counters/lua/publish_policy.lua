-- Make requests read under an older policy stale. The policy is stored also before there are counters; a rebuild keeps it.
-- ARGV: policy epoch. Returns the newest, which never decreases.

local newest = math.max(policy or 0, tonumber(ARGV[1]))
redis.call('HSET', state_key, 'policy', newest)
if not epoch then
  redis.call('EXPIRE', state_key, STATE_LIFE)
end
return newest
