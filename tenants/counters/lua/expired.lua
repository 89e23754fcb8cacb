-- Return reservations whose lease has expired, the oldest expiry first. ARGV: the largest number to return.

if not epoch then
  return {}
end
return redis.call('ZRANGEBYSCORE', key_of('leases', 'tenant'), '-inf', integer(now), 'LIMIT', 0, ARGV[1])
