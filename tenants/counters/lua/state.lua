-- The beginning of every script: a tenant's time, its state, and the names of its keys.
-- KEYS[1] is `loraplex:{<tenant>}:state`. Every other key has the same prefix, so all lie in one slot. Their names contain
-- periods of the server's time, which no caller can know.

local DAY = 86400
-- Seconds. The state expires first: without it the counters are rebuilt; lost counters under it would count as zeros.
local STATE_LIFE = 7 * DAY
local LIFE = 8 * DAY
local PERIOD_LIFE = { d = 10 * DAY, m = 40 * DAY }
-- From the last request of a session on.
local SESSION_LIFE = 7 * DAY

-- What the keys and fields mean. Older scripts must ignore what is added under one layout; a change that they would misread needs
-- the next one (README.md, "Gateways of two releases"). Any layout keeps the state's epoch, policy, clock and layout.
local LAYOUT = 2
-- The first layout that knows groups. These scripts read all before it, too.
local GROUPED = 2

local state_key = KEYS[1]
local prefix = string.sub(state_key, 1, -6)
local stored = redis.call('HMGET', state_key, 'epoch', 'policy', 'clock', 'empty_at', 'buckets', 'layout')
-- The first releases stored none.
local layout = tonumber(stored[6]) or 1
if layout > LAYOUT then
  return redis.error_reply('NEWER a gateway of a newer release counts for this tenant')
end

-- Microseconds. The time never goes back: where the server's clock is behind the last time seen, it stands until it has caught up.
-- A clock that is further behind has replaced one that was ahead. Then the counters, whose times lie in the future, are missing.
local MAX_STANDING = 60 * 1000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local seen = tonumber(stored[3]) or 0
local was_ahead = seen - now > MAX_STANDING
if not was_ahead then
  now = math.max(now, seen)
end

local epoch = not was_ahead and stored[1]
local policy = tonumber(stored[2])
-- Untouched buckets have been filling since then, in microseconds.
local empty_at = tonumber(stored[4])
-- The epoch that the buckets began with: a rebuild that finds them alive keeps them, under their names.
local buckets = stored[5] or epoch

-- Concatenation would write 15 digits at most.
local function integer(number)
  return string.format('%.0f', number)
end

-- Every script that stores a time calls this: no stored time of the past is later than the state's clock.
local function store_time()
  redis.call('HSET', state_key, 'clock', integer(now))
end

local function key_of(kind, subject)
  return prefix .. epoch .. ':' .. kind .. (subject and ':' .. subject or '')
end

local function rate_key(subject)
  return prefix .. buckets .. ':rate:' .. subject
end

-- What one session uses and has reserved of every subject. The ledger has no sums of sessions, so it outlives every rebuild.
local function session_key(session)
  return prefix .. 'session:' .. session
end

local function held_in_session(subject)
  return 'held:' .. epoch .. ':' .. subject
end

local function use_key(subject, period)
  return key_of('use', subject) .. ':' .. period
end

-- The names of the UTC day and month, `d:2026-11-21` and `m:2026-11`: days to civil date on a calendar of eras of 400
-- years that begin on 1 March (Hinnant, chrono-compatible low-level date algorithms).
local function periods()
  local floor = math.floor
  local days = floor(now / (DAY * 1000000)) + 719468
  local era = floor(days / 146097)
  local day = days - era * 146097
  local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
  local day_of_year = day - (365 * year + floor(year / 4) - floor(year / 100))
  local shifted = floor((5 * day_of_year + 2) / 153)
  local month = shifted < 10 and shifted + 3 or shifted - 9
  local civil_year = year + era * 400 + (month <= 2 and 1 or 0)
  local civil_month = string.format('%04d-%02d', civil_year, month)
  local day_of_month = day_of_year - floor((153 * shifted + 2) / 5) + 1
  return 'd:' .. civil_month .. string.format('-%02d', day_of_month), 'm:' .. civil_month
end
