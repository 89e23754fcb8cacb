-- A rate of L per minute is a bucket of L that refills by L/60 per second. What is kept is its debt: what it lacks to be
-- full, in parts of UNIT, of which L flow back per microsecond. So every step is exact, and below 2^53 for L up to 10^8.

local UNIT = 60000000

-- The debt at `moment`. A bucket without one has been filling since the counters were made. It is full again after UNIT
-- microseconds; a limit that was lowered leaves it empty at most.
local function owed(debt, at, limit, moment)
  local full = limit * UNIT
  if not debt then
    debt, at = full, empty_at
  end
  local elapsed = math.min(moment - tonumber(at), UNIT)
  return math.max(0, math.min(tonumber(debt), full) - elapsed * limit)
end

-- Whole units that it still gives. A quotient of integers this small is never rounded up to the next one.
local function room_in(debt, limit)
  return math.floor((limit * UNIT - debt) / UNIT)
end

-- The debt after `used` more; at most an empty bucket.
local function deeper(debt, used, limit)
  if used > room_in(debt, limit) then
    return limit * UNIT
  end
  return debt + used * UNIT
end

-- The bucket of tokens holds aside what open reservations may use, and pays when they end. While it is not known how large
-- it is, because the counters were seeded since its limit was last seen, it keeps what it has not paid.
local UNKNOWN = '?'

local function request_debt(key, limit)
  local bucket = redis.call('HMGET', key, 'requests', 'requests_at')
  return owed(bucket[1], bucket[2], limit, now)
end

local function token_debt(key, limit)
  local bucket = redis.call('HMGET', key, 'tokens', 'tokens_at', 'unpaid', 'unpaid_at')
  local debt, at = bucket[1], bucket[2]
  if bucket[3] then
    at = tonumber(bucket[4])
    debt = deeper(owed(debt, bucket[2], limit, at), tonumber(bucket[3]), limit)
  end
  return owed(debt, at, limit, now)
end

local function set_token_debt(key, limit, debt)
  redis.call('HSET', key, 'tokens_limit', limit, 'tokens', integer(debt), 'tokens_at', integer(now))
  redis.call('HDEL', key, 'unpaid', 'unpaid_at')
end

local function pay(key, tokens)
  local limit = redis.call('HGET', key, 'tokens_limit')
  if limit == UNKNOWN then
    redis.call('HINCRBY', key, 'unpaid', tokens)
    redis.call('HSET', key, 'unpaid_at', integer(now))
  elseif limit then
    limit = tonumber(limit)
    set_token_debt(key, limit, deeper(token_debt(key, limit), tonumber(tokens), limit))
  end
end
