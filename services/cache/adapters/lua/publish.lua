-- Answers {outcome} or {'unknown_worker'}; with 'accepted' {outcome, description, number evicted, evicted keys of this
-- worker}; a description is names and values in turn.
local key, ticket = order.key, order.ticket
local fence = integer(order.fence)

local function accepted(evicted, drop_keys)
  local scopes = call('SMEMBERS', base .. 'scopes:' .. key)
  local tenant_epoch, model_epoch = 0, 0
  for _, scope in ipairs(scopes) do
    if string.sub(scope, 1, 7) == 'tenant:' then
      tenant_epoch = epoch_of(scope)
    elseif string.sub(scope, 1, 6) == 'model:' then
      model_epoch = epoch_of(scope)
    end
  end
  call('SET', base .. 'life', order.life, 'NX')
  local description = call('HGETALL', base .. 'entry:' .. key)
  for name, value in pairs({
    key = key, scopes = scopes, epochs = { integer(tenant_epoch), integer(model_epoch) }, life = call('GET', base .. 'life'),
  }) do
    description[#description + 1] = name
    description[#description + 1] = value
  end
  return { 'accepted', description, evicted, drop_keys }
end

local made = call('HMGET', base .. 'entry:' .. key, 'ticket', 'fence')
local again = made[1] == ticket and made[2] == fence
local owned = call('HMGET', base .. 'ticket:' .. ticket, 'key', 'fence', 'dead', 'kind', 'tokens', 'lease')
if not again then
  if owned[1] ~= key or owned[2] ~= fence then
    return { 'fenced' }
  end
  if owned[3] == '1' then
    return { 'invalidated' }
  end
end
if expiry('workers', order.worker) == 0 then
  return { 'unknown_worker' }
end
if again and call('HEXISTS', base .. 'tiers:' .. key, order.worker) == 1 then
  return accepted(0, {})
end

local tenant = tenant_of(key)
local evicted = victims(tenant, again and size_of(key) or order.size, key)
if not evicted then
  if not again then
    end_ticket(ticket)
  end
  return { 'over_budget' }
end
local drop_keys = evict(evicted, order.worker)
if not again then
  call('HDEL', base .. 'ticket_of', key)
  forget_ticket(ticket)
  add_entry(key, {
    kind = owned[4], tenant = tenant, tokens = owned[5], size = order.size, fence = order.fence, ticket = ticket,
  })
  if expiry('leases', owned[6]) ~= 0 then
    lease_entry(owned[6], key)
  end
end
add_copy(key, order.worker, order.tier)
return accepted(#evicted, drop_keys)
