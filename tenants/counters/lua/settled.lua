-- What the counters have of the tenant's current day and month, and the ids of what they hold open, all of one moment.
-- Returns nothing without counters; else epoch, time, day, month, tokens and amount of the day, and of the month, and the ids.
-- The tenant's time goes on by a microsecond, also while it stands: what is let in later is later by its time, too.

if not epoch then
  return {}
end
redis.call('HSET', state_key, 'clock', integer(now + 1))
local day, month = periods()
local answer = { tonumber(epoch), now, day, month }
for _, period in ipairs({ day, month }) do
  local use = redis.call('HMGET', use_key('tenant', period), 'tokens', 'amount')
  answer[#answer + 1] = use[1] or '0'
  answer[#answer + 1] = use[2] or '0'
end
for _, id in ipairs(redis.call('HKEYS', key_of('open'))) do
  answer[#answer + 1] = id
end
return answer
