-- Answers the published entries of a scope: {key, kind, tokens, size, worker, address, tier, ...} each.
local found = {}
for _, key in ipairs(call('SMEMBERS', base .. 'scope:' .. order.scope)) do
  if published(key) then
    local fields = call('HMGET', base .. 'entry:' .. key, 'kind', 'tokens', 'size')
    local state = { key, fields[1], fields[2], fields[3] }
    local tiers = call('HGETALL', base .. 'tiers:' .. key)
    for i = 1, #tiers, 2 do
      state[#state + 1] = tiers[i]
      state[#state + 1] = call('HGET', base .. 'addresses', tiers[i])
      state[#state + 1] = tiers[i + 1]
    end
    found[#found + 1] = state
  end
end
return found
