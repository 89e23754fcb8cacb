-- Replaces all counters by what PostgreSQL knows, unless they are of this epoch or a later one. The old ones have other
-- names, and expire; but their buckets go on if they live and this epoch follows theirs (README.md, "Never over-admit").
-- Returns the epoch in force, 0 for none.
-- ARGV: epoch, policy epoch, whether buckets start full, lease in microseconds, number of totals; for each total its
-- subject, period, tokens, amount; then for each open reservation its id, key, adapter or -, tokens, amount, day, month.

local lease, totals = tonumber(ARGV[4]), tonumber(ARGV[5])
local FIRST, TOTAL_WIDTH, RESERVATION_WIDTH = 6, 4, 7
local reservations = FIRST + totals * TOTAL_WIDTH

local newest_epoch = tonumber(epoch or redis.call('HGET', state_key, 'forgotten'))
if newest_epoch and newest_epoch >= tonumber(ARGV[1]) then
  return tonumber(epoch) or 0
end

-- Of the seed's reservations, those that have ended in the counters: their buckets have been paid.
local paid = {}

-- What the old counters hold and the seed does not has ended in the books, or was not kept there. Nobody will tell these
-- counters what it used, so it pays its bound; what has ended has paid.
local function settle_buckets()
  local seeded = {}
  for first = reservations, #ARGV, RESERVATION_WIDTH do
    seeded[ARGV[first]] = true
    paid[ARGV[first]] = has_ended(ARGV[first])
  end
  local held = redis.call('HGETALL', key_of('open'))
  for index = 1, #held, 2 do
    local id, reservation = held[index], parse(held[index + 1])
    local owes = not (seeded[id] or has_ended(id))
    for _, subject in ipairs(subjects_of(reservation)) do
      redis.call('HDEL', rate_key(subject), held_field())
      if owes then
        pay(rate_key(subject), reservation.tokens)
      end
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
-- The policy may have been published while the seed was read.
local newest = math.max(policy or 0, tonumber(ARGV[2]))
redis.call('HSET', state_key, 'epoch', epoch, 'policy', newest, 'clock', integer(now))
redis.call('HSET', state_key, 'empty_at', integer(empty_at), 'buckets', buckets)
redis.call('HDEL', state_key, 'forgotten')
redis.call('EXPIRE', state_key, STATE_LIFE)

for first = FIRST, reservations - 1, TOTAL_WIDTH do
  add_use(ARGV[first], ARGV[first + 1], 'tokens', ARGV[first + 2], 'amount', ARGV[first + 3])
end
for first = reservations, #ARGV, RESERVATION_WIDTH do
  local held = { key = ARGV[first + 1], adapter = ARGV[first + 2], tokens = ARGV[first + 3] }
  held.amount, held.day, held.month, held.at = ARGV[first + 4], ARGV[first + 5], ARGV[first + 6], integer(now)
  hold_again(ARGV[first], held, lease)
  if paid[ARGV[first]] then
    remember_end(ARGV[first], ENDED_SECONDS)
  end
end
return tonumber(epoch)
