-- Answers the number of entries evicted.
local evicted = 0
for _, tenant in ipairs(call('HKEYS', base .. 'bytes_of')) do
  local found = victims(tenant, 0, '') or call('ZRANGE', base .. 'idle:' .. tenant, 0, -1)
  for _, key in ipairs(found) do
    remove_entry(key, {})
    evicted = evicted + 1
  end
end
return evicted
