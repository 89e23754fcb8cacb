-- Forgets the counters and the clock, not the policy: the next admission finds nothing seeded. A seed of this epoch that
-- arrives late is refused, since it would count on top of the forgotten counters.

if epoch then
  redis.call('HSET', state_key, 'forgotten', epoch)
  redis.call('HDEL', state_key, 'epoch', 'clock', 'empty_at')
end
return 1
