-- Replaces all counters by what PostgreSQL knows, unless they are of this epoch or a later one. The old ones have other
-- names, and expire. Returns the epoch in force, 0 for none.
-- ARGV: epoch, policy epoch, whether buckets start full, lease in microseconds, number of totals; for each total its
-- subject, period, tokens, amount; then for each open reservation its id, key, adapter or -, tokens, amount, day, month.

local lease, totals = tonumber(ARGV[4]), tonumber(ARGV[5])
local FIRST, TOTAL_WIDTH, RESERVATION_WIDTH = 6, 4, 7

local newest_epoch = tonumber(epoch or redis.call('HGET', state_key, 'forgotten'))
if newest_epoch and newest_epoch >= tonumber(ARGV[1]) then
  return tonumber(epoch) or 0
end
epoch = ARGV[1]
empty_at = ARGV[3] == '1' and 0 or now
-- The policy may have been published while the seed was read.
local newest = math.max(policy or 0, tonumber(ARGV[2]))
redis.call('HSET', state_key, 'epoch', epoch, 'policy', newest, 'clock', integer(now), 'empty_at', integer(empty_at))
redis.call('HDEL', state_key, 'forgotten')
redis.call('EXPIRE', state_key, STATE_LIFE)

local reservations = FIRST + totals * TOTAL_WIDTH
for first = FIRST, reservations - 1, TOTAL_WIDTH do
  add_use(ARGV[first], ARGV[first + 1], 'tokens', ARGV[first + 2], 'amount', ARGV[first + 3])
end
for first = reservations, #ARGV, RESERVATION_WIDTH do
  local held = { key = ARGV[first + 1], adapter = ARGV[first + 2], tokens = ARGV[first + 3] }
  held.amount, held.day, held.month, held.at = ARGV[first + 4], ARGV[first + 5], ARGV[first + 6], integer(now)
  hold_again(ARGV[first], held, lease)
end
return tonumber(epoch)
