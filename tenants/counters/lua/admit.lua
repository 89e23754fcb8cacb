-- Test every limit of every level, then take from all of them or from none. A denied request writes only its explanation.
-- ARGV: reservation id, request id, policy epoch, tokens, amount, sequences, lease in microseconds, the session or '' where none is
-- counted; then for each subject its level, its id, and its limits in the order of `COUNTED`, '' for none: seven, and with a session
-- that of its tokens. Amounts in nano-units. A group's use is its root's.

local id, request_id, read_under = ARGV[1], ARGV[2], tonumber(ARGV[3])
local tokens, amount, sequences = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local lease, session = tonumber(ARGV[7]), ARGV[8] ~= '' and ARGV[8] or nil
local FIRST, WIDTH = 9, session and 10 or 9
local LEVELS = { tenant = 1, key = 2, adapter = 3, group = 4 }
local NEVER = -1
local MAX_WAIT = 3600000000
local KEPT_DENIALS = 1000

if not (epoch and policy) then
  return { 'unseeded' }
end
if policy > read_under then
  return { 'stale', policy }
end
if layout < GROUPED and ARGV[FIRST + WIDTH] == 'group' then
  -- What a release without groups counted for a root lacks the keys below it.
  redis.call('HSET', state_key, 'forgotten', epoch)
  redis.call('HDEL', state_key, 'epoch', 'empty_at', 'buckets')
  return { 'unseeded' }
end
if has_ended(id) then
  return { 'ended' }
end

local known = open(id)
local day, month = periods()
local requests_needed, tokens_needed, amount_needed, sequences_needed = 1, tokens, amount, sequences
if known then
  day, month = known.day, known.month
  requests_needed, tokens_needed, amount_needed, sequences_needed = 0, 0, 0, 0
end

local decisions = {}
local denied = false

-- `wait`, in microseconds, is meaningful for rates only.
local function decide(level, name, limit, used, reserved, needed, wait)
  local passed = known or needed <= limit - used - reserved
  if needed > limit then
    wait = NEVER
  elseif passed then
    wait = 0
  end
  denied = denied or not passed
  for _, number in ipairs({ level, name, limit, used, reserved, needed, passed and 1 or 0, wait }) do
    decisions[#decisions + 1] = number
  end
end

local function wait_for(debt, wanted, limit)
  if limit == 0 then
    return NEVER
  end
  return math.min(MAX_WAIT, math.max(1, math.ceil(((wanted - limit) * UNIT + debt) / limit)))
end

local function test_rates(level, rate, requests_limit, tokens_limit)
  if requests_limit then
    local debt = request_debt(rate, requests_limit)
    local wait = wait_for(debt, requests_needed, requests_limit)
    decide(level, 1, requests_limit, requests_limit - room_in(debt, requests_limit), 0, requests_needed, wait)
  end
  if tokens_limit then
    local debt = token_debt(rate, tokens_limit)
    local reserved = tonumber(rate.reserved)
    local wait = wait_for(debt, reserved + tokens_needed, tokens_limit)
    decide(level, 2, tokens_limit, tokens_limit - room_in(debt, tokens_limit), reserved, tokens_needed, wait)
  end
end

local function test_period(level, subject, period, name, tokens_limit, amount_limit)
  if not (tokens_limit or amount_limit) then
    return
  end
  local key = use_key(subject, period)
  local use = redis.call('HMGET', key, 'tokens', 'reserved_tokens', 'amount', 'reserved_amount')
  if tokens_limit then
    decide(level, name, tokens_limit, tonumber(use[1]) or 0, tonumber(use[2]) or 0, tokens_needed, 0)
  end
  if amount_limit then
    decide(level, name + 2, amount_limit, tonumber(use[3]) or 0, tonumber(use[4]) or 0, amount_needed, 0)
  end
end

local function test_session(level, subject, limit)
  local use = redis.call('HMGET', session_key(session), subject, held_in_session(subject))
  decide(level, 8, limit, tonumber(use[1]) or 0, tonumber(use[2]) or 0, tokens_needed, 0)
end

local request = { adapter = '-', tokens = ARGV[4], amount = ARGV[5], day = day, month = month, at = integer(now) }
request.sequences, request.session = ARGV[6], session
local expired = expired_sequences()
local levels = {}
for first = FIRST, #ARGV, WIDTH do
  local kind, subject_id = ARGV[first], ARGV[first + 1]
  local level, subject = LEVELS[kind], 'tenant'
  if level > 1 then
    subject = (kind == 'group' and 'key' or kind) .. ':' .. subject_id
    request[kind] = subject_id
  end
  local limits = {}
  for index = 1, WIDTH - 2 do
    limits[index] = tonumber(ARGV[first + 1 + index]) or false
  end
  local rate = read_rate(rate_key(subject))
  levels[#levels + 1] = { key = rate_key(subject), rate = rate, requests = limits[1], tokens = limits[2] }
  test_rates(level, rate, limits[1], limits[2])
  if limits[3] then
    decide(level, 3, limits[3], running_sequences(subject, rate, expired), 0, sequences_needed, 0)
  end
  test_period(level, subject, day, 4, limits[4], limits[6])
  test_period(level, subject, month, 5, limits[5], limits[7])
  if limits[8] then
    test_session(level, subject, limits[8])
  end
end

local overdue = redis.call('ZCOUNT', key_of('leases', 'tenant'), '-inf', integer(now))
local function reply(kind, at)
  return { kind, tonumber(epoch), at, day, month, overdue, known and 1 or 0, decisions }
end

if known then
  return reply('admitted', tonumber(known.at))
end
if denied then
  local line = { request_id, integer(now), day, month }
  for _, number in ipairs(decisions) do
    line[#line + 1] = integer(number)
  end
  local key = prefix .. 'denials'
  redis.call('LPUSH', key, table.concat(line, ' '))
  redis.call('LTRIM', key, 0, KEPT_DENIALS - 1)
  redis.call('EXPIRE', key, DAY)
  return reply('denied', now)
end

local requests_limits = {}
for level, limited in ipairs(levels) do
  admit_to(limited.key, limited.rate, limited.requests, limited.tokens)
  requests_limits[level] = limited.requests and integer(limited.requests) or '-'
end
request.requests_limits = table.concat(requests_limits, ',')
if request.group then
  request.key = request.key .. '@' .. request.group
end
reserve(id, request, lease)
redis.call('HSET', state_key, 'clock', integer(now), 'policy', math.max(policy, read_under))
redis.call('EXPIRE', state_key, STATE_LIFE)
return reply('admitted', now)
