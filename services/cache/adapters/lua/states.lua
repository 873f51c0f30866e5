-- Answers the published entries of a scope: {key, kind, tokens, size, worker, address, tier, ...} each.
local found = {}
for _, key in ipairs(call('SMEMBERS', base .. 'scope:' .. order.scope)) do
  local entry = entry_of(key)
  if entry then
    local state = { key, part(entry, 'kind'), part(entry, 'tokens'), part(entry, 'size') }
    for worker, tier in pairs(holders_of(entry)) do
      put(state, worker, call('HGET', base .. 'addresses', worker))
      append(state, tier)
    end
    append(found, state)
  end
end
return found
