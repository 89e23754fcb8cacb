-- Return the current use of every limit. ARGV: a session or '', then for each subject its name, its limit of requests and of
-- tokens per minute or ''. Returns nothing without counters; else the epoch, time, day, month, and for each subject: what its
-- buckets lack, the tokens set aside, its running sequences, the settled and reserved tokens and amounts of the day and of the
-- month, and the settled and reserved tokens of the session.

local WIDTH = 3

if not epoch then
  return {}
end
local day, month = periods()
local reply = { tonumber(epoch), now, day, month }
local expired = expired_sequences()

local function lacks(debt_of, rate, limit)
  return limit and limit - room_in(debt_of(rate, limit), limit) or 0
end

for first = 2, #ARGV, WIDTH do
  local subject = ARGV[first]
  local rate = read_rate(rate_key(subject))
  reply[#reply + 1] = lacks(request_debt, rate, tonumber(ARGV[first + 1]))
  reply[#reply + 1] = lacks(token_debt, rate, tonumber(ARGV[first + 2]))
  reply[#reply + 1] = rate.reserved
  reply[#reply + 1] = running_sequences(subject, rate, expired)
  for _, period in ipairs({ day, month }) do
    local key = use_key(subject, period)
    for _, field in ipairs({ 'tokens', 'reserved_tokens', 'amount', 'reserved_amount' }) do
      reply[#reply + 1] = redis.call('HGET', key, field) or '0'
    end
  end
  for _, field in ipairs({ subject, held_in_session(subject) }) do
    reply[#reply + 1] = ARGV[1] ~= '' and redis.call('HGET', session_key(ARGV[1]), field) or '0'
  end
end
return reply
