-- Answers a list of {evictor, victim, entries, bytes, tokens}.
local rows = {}
for pair, counts in pairs(pairs_of(call('HGETALL', base .. 'evictions'))) do
  local evictor, victim = string.match(pair, '^(%S+) (%S+)$')
  local entries, bytes, tokens = string.match(counts, '^(%S+) (%S+) (%S+)$')
  append(rows, { evictor, victim, entries, bytes, tokens })
end
return rows
