-- Answers the number of entries evicted.
local evicted = 0
for _, tenant in ipairs(call('HKEYS', base .. 'bytes_of')) do
  local found = victims(tenant, 0, '')
  if not found then
    found = {}
    local idle = call('ZRANGE', base .. 'idle:' .. tenant, 0, -1, 'WITHSCORES')
    for i = 1, #idle, 2 do
      found[#found + 1] = { idle[i], tonumber(idle[i + 1]) }
    end
  end
  evict(found)
  evicted = evicted + #found
end
return evicted
