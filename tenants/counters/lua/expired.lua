-- Reservations whose lease is over, longest first. ARGV: how many at most.

if not epoch then
  return {}
end
return redis.call('ZRANGEBYSCORE', key_of('leases', 'tenant'), '-inf', integer(now), 'LIMIT', 0, ARGV[1])
