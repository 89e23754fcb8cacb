-- Return the line of a request's newest denial within a day. ARGV: request id.

local AT_ONCE = 100
local wanted = ARGV[1] .. ' '
for first = 0, 900, AT_ONCE do
  for _, line in ipairs(redis.call('LRANGE', prefix .. 'denials', first, first + AT_ONCE - 1)) do
    if string.sub(line, 1, #wanted) == wanted then
      local at = tonumber(string.match(line, '^%S+ (%S+)'))
      return now - at < DAY * 1000000 and line or false
    end
  end
end
return false
