-- End a reservation with its use. Returns whether there was one, whether an id without one was charged, and the epoch, 0 for
-- none.
-- ARGV: reservation id, tokens, amount, 1 for a request that was refused before anything ran, step; to charge an id without one
-- also key, adapter or -, day, month, the only epoch under which to charge it, '' for any, and session or ''. `settle`
-- remembers the end of any id. `early`, before the ledger has the use, and `reap`, which only ends an expired lease, neither
-- charge nor remember what they do not find.

local id, tokens, amount, refused, step = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5]
local CHARGED_SECONDS = DAY

if not epoch then
  return { 0, 0, 0 }
end
local in_force = tonumber(epoch)
local reservation = open(id)
if reservation then
  if step == 'reap' then
    local expiry = redis.call('ZSCORE', key_of('leases', 'tenant'), id)
    if expiry and tonumber(expiry) > now then
      return { 0, 0, in_force }
    end
  end
  store_time()
  remove(id, reservation)
  -- A gateway that got no reply admitted it by its own clock: the ledger has these periods.
  reservation.day, reservation.month = ARGV[8] or reservation.day, ARGV[9] or reservation.month
  if refused then
    give_back(reservation)
  end
  charge(reservation, tokens, amount)
  local unused = step == 'reap' and tokens == '0' and amount == '0'
  remember_end(unused and GIVEN_UP .. id or id, ENDED_SECONDS)
  return { 1, 0, in_force }
end
if step ~= 'settle' then
  return { 0, 0, in_force }
end
if ARGV[6] and not is_remembered(id) and (ARGV[10] == '' or ARGV[10] == epoch) then
  store_time()
  local session = ARGV[11] ~= '' and ARGV[11] or nil
  charge({ key = ARGV[6], adapter = ARGV[7], day = ARGV[8], month = ARGV[9], session = session }, tokens, amount)
  remember_end(id, CHARGED_SECONDS)
  return { 0, 1, in_force }
end
if not is_remembered(id) then
  store_time()
  remember_end(id, ENDED_SECONDS)
end
return { 0, 0, in_force }
