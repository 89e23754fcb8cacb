-- Discard the counters, not the clock and the policy: the next admission finds no counters. A rebuild of this epoch that
-- arrives late is refused, since it would add to the discarded counters. Returns whether there were counters.
-- ARGV: the only epoch to discard, '' for any.

if epoch and (ARGV[1] == '' or ARGV[1] == epoch) then
  redis.call('HSET', state_key, 'forgotten', epoch)
  redis.call('HDEL', state_key, 'epoch', 'empty_at', 'buckets')
  return 1
end
return 0
