-- Forgets the counters, not the clock and the policy: the next admission finds nothing seeded. A seed of this epoch that
-- arrives late is refused, since it would count on top of the forgotten counters. Returns whether it forgot some.
-- ARGV: the epoch that alone is to be forgotten, '' for any.

if epoch and (ARGV[1] == '' or ARGV[1] == epoch) then
  redis.call('HSET', state_key, 'forgotten', epoch)
  redis.call('HDEL', state_key, 'epoch', 'empty_at', 'buckets')
  return 1
end
return 0
