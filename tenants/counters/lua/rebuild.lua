-- Replace all counters by what PostgreSQL knows, unless they are of this epoch or a later one. The old counters have other
-- names and expire. Their buckets continue if they live and this epoch is the next (README.md, "Never over-admit").
-- Returns the epoch in force, 0 for none.
-- ARGV: epoch, policy epoch, whether buckets start full, lease in microseconds, number of totals; for each total its
-- subject, period, tokens, amount; then for each open reservation its id, key, adapter or -, tokens, amount, day, month,
-- sequences.

local lease, totals = tonumber(ARGV[4]), tonumber(ARGV[5])
local FIRST, TOTAL_WIDTH, RESERVATION_WIDTH = 6, 4, 8
local reservations = FIRST + totals * TOTAL_WIDTH

local newest_epoch = tonumber(stored[1] or redis.call('HGET', state_key, 'forgotten'))
if newest_epoch and newest_epoch >= tonumber(ARGV[1]) then
  return tonumber(stored[1]) or 0
end

-- The reservations of the snapshot that have ended in the counters: their buckets have paid.
local paid = {}
-- The sessions of those that the counters have: the snapshot knows none.
local sessions = {}

-- A reservation that the old counters have and the snapshot lacks has ended in the ledger, or was not stored there. No later
-- update tells the new counters what it used, so it pays its bound now; what has ended in the counters has paid.
local function settle_buckets()
  local in_snapshot = {}
  for first = reservations, #ARGV, RESERVATION_WIDTH do
    in_snapshot[ARGV[first]] = true
    paid[ARGV[first]] = has_ended(ARGV[first])
  end
  local open_reservations = redis.call('HGETALL', key_of('open'))
  for index = 1, #open_reservations, 2 do
    local id, reservation = open_reservations[index], parse(open_reservations[index + 1])
    local owes = not (in_snapshot[id] or has_ended(id))
    sessions[id] = reservation.session
    for _, subject in ipairs(subjects_of(reservation)) do
      redis.call('HDEL', rate_key(subject), reserved_field(), sequences_field())
      if reservation.session then
        redis.call('HDEL', session_key(reservation.session), held_in_session(subject))
      end
      if owes then
        pay(rate_key(subject), reservation.tokens)
        use_in_session(reservation, subject, reservation.tokens)
      end
    end
    if reservation.session then
      keep_session(reservation.session)
    end
  end
end

if epoch and tonumber(epoch) + 1 == tonumber(ARGV[1]) then
  settle_buckets()
else
  buckets = ARGV[1]
  empty_at = ARGV[3] == '1' and 0 or now
end
epoch = ARGV[1]
-- The policy may have been published while the snapshot was read.
local newest = math.max(policy or 0, tonumber(ARGV[2]))
redis.call('HSET', state_key, 'epoch', epoch, 'policy', newest, 'clock', integer(now))
redis.call('HSET', state_key, 'empty_at', integer(empty_at), 'buckets', buckets, 'layout', LAYOUT)
redis.call('HDEL', state_key, 'forgotten')
redis.call('EXPIRE', state_key, STATE_LIFE)

for first = FIRST, reservations - 1, TOTAL_WIDTH do
  add_use(ARGV[first], ARGV[first + 1], 'tokens', ARGV[first + 2], 'amount', ARGV[first + 3])
end
for first = reservations, #ARGV, RESERVATION_WIDTH do
  local reservation = { key = ARGV[first + 1], adapter = ARGV[first + 2], tokens = ARGV[first + 3] }
  reservation.amount, reservation.day, reservation.month = ARGV[first + 4], ARGV[first + 5], ARGV[first + 6]
  reservation.at, reservation.sequences = integer(now), ARGV[first + 7]
  reservation.session = sessions[ARGV[first]]
  restore(ARGV[first], reservation, lease)
  if paid[ARGV[first]] then
    remember_end(ARGV[first], ENDED_SECONDS)
  end
end
return tonumber(epoch)
