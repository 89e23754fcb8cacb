-- What is used of every limit now. ARGV: for each subject its name, its limit of requests and of tokens per minute or ''.
-- Returns nothing without counters; else the epoch, the time, day, month, and for each subject what its buckets lack, what they
-- hold aside, its running requests, and the settled and reserved tokens and amounts of the day and of the month.

local WIDTH = 3

if not epoch then
  return {}
end
local day, month = periods()
local answer = { tonumber(epoch), now, day, month }

local function lacks(debt_of, rate, limit)
  return limit and limit - room_in(debt_of(rate, limit), limit) or 0
end

for first = 1, #ARGV, WIDTH do
  local subject = ARGV[first]
  local rate = read_rate(rate_key(subject))
  answer[#answer + 1] = lacks(request_debt, rate, tonumber(ARGV[first + 1]))
  answer[#answer + 1] = lacks(token_debt, rate, tonumber(ARGV[first + 2]))
  answer[#answer + 1] = rate.held
  answer[#answer + 1] = redis.call('ZCOUNT', key_of('leases', subject), '(' .. integer(now), '+inf')
  for _, period in ipairs({ day, month }) do
    local key = use_key(subject, period)
    for _, field in ipairs({ 'tokens', 'reserved_tokens', 'amount', 'reserved_amount' }) do
      answer[#answer + 1] = redis.call('HGET', key, field) or '0'
    end
  end
end
return answer
