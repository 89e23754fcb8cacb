-- Extend leases and recreate lost reservations: under their own epoch only, since a later rebuild knew what was open.
-- ARGV: lease in microseconds; then for each reservation its id, key, adapter or -, tokens, amount, day, month, sequences,
-- epoch or '', and session or ''. Returns the epoch and, for each, 1 extended, 2 recreated, 3 lost; nothing without counters.

local lease = tonumber(ARGV[1])
local WIDTH = 10

if not epoch then
  return {}
end

local function extend(id, reservation)
  for _, subject in ipairs(subjects_of(reservation)) do
    redis.call('ZADD', key_of('leases', subject), 'XX', now + lease, id)
    redis.call('EXPIRE', key_of('leases', subject), LIFE)
  end
  return 1
end

if #ARGV > 1 then
  store_time()
end
local replies = { tonumber(epoch) }
for first = 2, #ARGV, WIDTH do
  local id = ARGV[first]
  local reservation = open(id)
  local admitted_under = ARGV[first + 8]
  local outcome = 3
  if reservation then
    outcome = extend(id, reservation)
  elseif not has_ended(id) and (admitted_under == '' or admitted_under == epoch) then
    local lost = { key = ARGV[first + 1], adapter = ARGV[first + 2], tokens = ARGV[first + 3] }
    lost.amount, lost.day, lost.month, lost.at = ARGV[first + 4], ARGV[first + 5], ARGV[first + 6], integer(now)
    lost.sequences, lost.session = ARGV[first + 7], ARGV[first + 9] ~= '' and ARGV[first + 9] or nil
    restore(id, lost, lease)
    outcome = 2
  end
  replies[#replies + 1] = outcome
end
return replies
