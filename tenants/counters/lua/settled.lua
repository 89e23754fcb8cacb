-- Return the tenant's settled use of the current day and month and the ids of its open reservations, at one moment: nothing
-- without counters; else epoch, time, day, month, tokens and amount of the day and of the month, and the ids.
-- The tenant's time moves on by a microsecond, even while its clock stands: so a later admission also has a later time.

if not epoch then
  return {}
end
redis.call('HSET', state_key, 'clock', integer(now + 1))
local day, month = periods()
local reply = { tonumber(epoch), now, day, month }
for _, period in ipairs({ day, month }) do
  local use = redis.call('HMGET', use_key('tenant', period), 'tokens', 'amount')
  reply[#reply + 1] = use[1] or '0'
  reply[#reply + 1] = use[2] or '0'
end
for _, id in ipairs(redis.call('HKEYS', key_of('open'))) do
  reply[#reply + 1] = id
end
return reply
