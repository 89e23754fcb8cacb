-- An open reservation is in every counter it may end in, at every level; its end removes it from all of them.
-- Its record is one line: key, or key@root in a group, adapter or -, tokens, amount, day, month, time of admission, sequences,
-- the requests per minute of each level, - for none, and its session if that is counted. One that no admission wrote, or a release
-- without sessions, may lack the last two. What such a release ends stays reserved of its session until a rebuild.

local ENDED_SECONDS = 600
local EXPIRED_AT_ONCE = 100
local MAX_SESSIONS = 10000

local function parse(record)
  local parts = {}
  for part in string.gmatch(record, '%S+') do
    parts[#parts + 1] = part
  end
  local reservation = { key = parts[1], adapter = parts[2], tokens = parts[3], amount = parts[4] }
  reservation.day, reservation.month, reservation.at = parts[5], parts[6], parts[7]
  -- A release that counted requests wrote no number, and added none to the running sequences.
  reservation.sequences = parts[8] or '0'
  reservation.requests_limits, reservation.session = parts[9], parts[10]
  return reservation
end

local function subjects_of(reservation)
  local subjects, at = { 'tenant' }, string.find(reservation.key, '@', 1, true)
  if at then
    subjects[2] = 'key:' .. string.sub(reservation.key, at + 1)
  end
  subjects[#subjects + 1] = 'key:' .. string.sub(reservation.key, 1, (at or 0) - 1)
  if reservation.adapter ~= '-' then
    subjects[#subjects + 1] = 'adapter:' .. reservation.adapter
  end
  return subjects
end

local function open(id)
  local record = redis.call('HGET', key_of('open'), id)
  return record and parse(record)
end

-- A reservation that was given up unused has ended, but its use is counted if its gateway lives or its journal is found.
local GIVEN_UP = '-'

local function is_remembered(member)
  local until_when = redis.call('ZSCORE', key_of('ended'), member)
  return until_when and tonumber(until_when) > now
end

local function has_ended(id)
  return is_remembered(id) or is_remembered(GIVEN_UP .. id)
end

-- Remember an ended id for `seconds`: late steps of this id are refused.
local function remember_end(id, seconds)
  local key = key_of('ended')
  redis.call('ZADD', key, now + seconds * 1000000, id)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  redis.call('EXPIRE', key, DAY)
end

-- Add to a counter. A new one gets its lifetime, at least nine days longer than its period.
local function add_use(subject, period, tokens_field, tokens, amount_field, amount)
  local key = use_key(subject, period)
  local first = redis.call('HINCRBY', key, tokens_field, tokens) == tonumber(tokens)
  if amount ~= '0' then
    redis.call('HINCRBY', key, amount_field, amount)
  end
  if first then
    redis.call('EXPIRE', key, PERIOD_LIFE[string.sub(period, 1, 1)])
  end
end

-- Subtract, never below zero; an expired counter is not created again. Returns what is left.
local function take(key, field, amount)
  local there = redis.call('HGET', key, field) or '0'
  local gone = tonumber(there) > tonumber(amount) and amount or there
  return gone == '0' and tonumber(there) or redis.call('HINCRBY', key, field, '-' .. gone)
end

-- As `take`; a field at zero is removed.
local function release(key, field, amount)
  if take(key, field, amount) == 0 then
    redis.call('HDEL', key, field)
  end
end

-- The sequences of reservations whose lease has expired, by subject. Beyond the `EXPIRED_AT_ONCE` oldest, they count as running
-- until they are reaped.
local function expired_sequences()
  local expired = {}
  local leases = key_of('leases', 'tenant')
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', integer(now), 'LIMIT', 0, EXPIRED_AT_ONCE)) do
    local reservation = open(id)
    for _, subject in ipairs(reservation and subjects_of(reservation) or {}) do
      expired[subject] = (expired[subject] or 0) + tonumber(reservation.sequences)
    end
  end
  return expired
end

local function has_leases(subject)
  return redis.call('ZCARD', key_of('leases', subject)) > 0
end

-- A release that counted requests subtracts no sequences. What it leaves of them ends with the last lease of the subject.
local function running_sequences(subject, rate, expired)
  return has_leases(subject) and tonumber(rate.sequences) - (expired[subject] or 0) or 0
end

-- After a change of a session: it is forgotten if it used and holds nothing; beyond `MAX_SESSIONS`, the one that is idle longest.
-- One that holds tokens counts as idle in a week: it is forgotten after all idle ones, or where its end never came.
local function keep_session(session)
  local key, index = session_key(session), prefix .. 'sessions'
  local use = redis.call('HMGET', key, 'tenant', held_in_session('tenant'))
  if not (use[1] or use[2]) then
    redis.call('DEL', key)
    redis.call('ZREM', index, session)
    return
  end
  redis.call('EXPIRE', key, SESSION_LIFE)
  redis.call('ZADD', index, integer(now + (use[2] and SESSION_LIFE * 1000000 or 0)), session)
  redis.call('EXPIRE', index, SESSION_LIFE)
  if redis.call('ZCARD', index) > MAX_SESSIONS then
    redis.call('DEL', session_key(redis.call('ZPOPMIN', index)[1]))
  end
end

local function reserve(id, reservation, lease)
  for _, subject in ipairs(subjects_of(reservation)) do
    if not has_leases(subject) then
      redis.call('HDEL', rate_key(subject), sequences_field())
    end
    for _, period in ipairs({ reservation.day, reservation.month }) do
      add_use(subject, period, 'reserved_tokens', reservation.tokens, 'reserved_amount', reservation.amount)
    end
    redis.call('HINCRBY', rate_key(subject), reserved_field(), reservation.tokens)
    redis.call('HINCRBY', rate_key(subject), sequences_field(), reservation.sequences)
    redis.call('EXPIRE', rate_key(subject), LIFE)
    if reservation.session then
      redis.call('HINCRBY', session_key(reservation.session), held_in_session(subject), reservation.tokens)
    end
    redis.call('ZADD', key_of('leases', subject), now + lease, id)
    redis.call('EXPIRE', key_of('leases', subject), LIFE)
  end
  local record = { reservation.key, reservation.adapter, reservation.tokens, reservation.amount }
  record[5], record[6], record[7] = reservation.day, reservation.month, reservation.at
  record[8], record[9] = reservation.sequences, reservation.requests_limits
  if reservation.session then
    record[9], record[10] = reservation.requests_limits or '-', reservation.session
    keep_session(reservation.session)
  end
  redis.call('HSET', key_of('open'), id, table.concat(record, ' '))
  redis.call('EXPIRE', key_of('open'), LIFE)
end

local function remove(id, reservation)
  for _, subject in ipairs(subjects_of(reservation)) do
    for _, period in ipairs({ reservation.day, reservation.month }) do
      take(use_key(subject, period), 'reserved_tokens', reservation.tokens)
      take(use_key(subject, period), 'reserved_amount', reservation.amount)
    end
    release(rate_key(subject), reserved_field(), reservation.tokens)
    release(rate_key(subject), sequences_field(), reservation.sequences)
    if reservation.session then
      release(session_key(reservation.session), held_in_session(subject), reservation.tokens)
    end
    redis.call('ZREM', key_of('leases', subject), id)
  end
  redis.call('HDEL', key_of('open'), id)
end

-- Give a refused request back to the buckets that it was taken from, less what has flowed back to them since its admission.
local function give_back(reservation)
  local subjects, level = subjects_of(reservation), 0
  for limit in string.gmatch(reservation.requests_limits or '', '[^,]+') do
    level = level + 1
    local lacking = limit ~= '-' and UNIT - math.min(now - tonumber(reservation.at), UNIT) * tonumber(limit) or 0
    if lacking > 0 then
      take(rate_key(subjects[level]), 'requests', integer(lacking))
    end
  end
end

-- Reserve without an admission, so without the limits that it was tested against.
local function restore(id, reservation, lease)
  reserve(id, reservation, lease)
  for _, subject in ipairs(subjects_of(reservation)) do
    redis.call('HSETNX', rate_key(subject), 'tokens_limit', UNKNOWN)
  end
end

local function use_in_session(reservation, subject, tokens)
  if reservation.session and tokens ~= '0' then
    redis.call('HINCRBY', session_key(reservation.session), subject, tokens)
  end
end

-- Count the use, after `remove`.
local function charge(reservation, tokens, amount)
  for _, subject in ipairs(subjects_of(reservation)) do
    for _, period in ipairs({ reservation.day, reservation.month }) do
      add_use(subject, period, 'tokens', tokens, 'amount', amount)
    end
    pay(rate_key(subject), tokens)
    use_in_session(reservation, subject, tokens)
  end
  if reservation.session then
    keep_session(reservation.session)
  end
end
