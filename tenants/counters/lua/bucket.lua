-- A rate of L per minute is a bucket of L that refills by L/60 per second. The stored value is its debt: the amount that it
-- lacks, in parts of UNIT, of which L flow back per microsecond. So every step is exact, and below 2^53 for L up to 10^8.

local UNIT = 60000000

-- The debt at `moment`. A bucket without a stored debt has been filling since the counters were created. It is full after
-- UNIT microseconds. If its limit was lowered, it is at most empty.
local function owed(debt, at, limit, moment)
  local full = limit * UNIT
  if not debt then
    debt, at = full, empty_at
  end
  local elapsed = math.min(moment - tonumber(at), UNIT)
  return math.max(0, math.min(tonumber(debt), full) - elapsed * limit)
end

-- Whole units left in the bucket. A quotient of integers this small is never rounded up to the next integer.
local function room_in(debt, limit)
  return math.floor((limit * UNIT - debt) / UNIT)
end

-- The debt after using `used` more; at most that of an empty bucket.
local function deeper(debt, used, limit)
  if used > room_in(debt, limit) then
    return limit * UNIT
  end
  return debt + used * UNIT
end

-- Open reservations set their bounds aside in the token bucket, which pays when they end. Until the first admission brings
-- the bucket's limit, its size is unknown; then it adds up what it has not paid.
local UNKNOWN = '?'

-- Named after the epoch: buckets outlive it, while each rebuild writes the reserved tokens again.
local function reserved_field()
  return 'held:' .. epoch
end

-- The sequences of all open reservations, also of those whose lease has expired.
local function sequences_field()
  return 'sequences:' .. epoch
end

local function read_rate(key)
  local read = redis.call(
    'HMGET', key, 'requests', 'requests_at', 'tokens', 'tokens_at', 'unpaid', 'unpaid_at', 'tokens_limit', reserved_field(),
    sequences_field()
  )
  local rate = { requests = read[1], requests_at = read[2], tokens = read[3], tokens_at = read[4] }
  rate.unpaid, rate.unpaid_at, rate.tokens_limit, rate.reserved = read[5], read[6], read[7], read[8] or '0'
  rate.sequences = read[9] or '0'
  return rate
end

local function request_debt(rate, limit)
  return owed(rate.requests, rate.requests_at, limit, now)
end

local function token_debt(rate, limit)
  if not rate.unpaid then
    return owed(rate.tokens, rate.tokens_at, limit, now)
  end
  local at = tonumber(rate.unpaid_at)
  local debt = deeper(owed(rate.tokens, rate.tokens_at, limit, at), tonumber(rate.unpaid), limit)
  return owed(debt, at, limit, now)
end

local function pay(key, tokens)
  local rate = read_rate(key)
  if rate.tokens_limit == UNKNOWN then
    redis.call('HINCRBY', key, 'unpaid', tokens)
    redis.call('HSET', key, 'unpaid_at', integer(now))
  elseif rate.tokens_limit then
    local limit = tonumber(rate.tokens_limit)
    local debt = deeper(token_debt(rate, limit), tonumber(tokens), limit)
    redis.call('HSET', key, 'tokens', integer(debt), 'tokens_at', integer(now))
  end
end

-- Record an admission: one more request, and the tokens' debt as it was tested. After a limit was removed, what is used
-- until there is one again is free.
local function admit_to(key, rate, requests_limit, tokens_limit)
  local fields = {}
  if requests_limit then
    local debt = deeper(request_debt(rate, requests_limit), 1, requests_limit)
    fields = { 'requests', integer(debt), 'requests_at', integer(now) }
  end
  if tokens_limit then
    local kept = { 'tokens_limit', tokens_limit, 'tokens', integer(token_debt(rate, tokens_limit)), 'tokens_at' }
    for _, field in ipairs(kept) do
      fields[#fields + 1] = field
    end
    fields[#fields + 1] = integer(now)
  end
  if #fields > 0 then
    redis.call('HSET', key, unpack(fields))
  end
  if rate.unpaid then
    redis.call('HDEL', key, 'unpaid', 'unpaid_at')
  end
  if rate.tokens_limit and not tokens_limit then
    redis.call('HDEL', key, 'tokens_limit')
  end
end
