-- Answers {outcome} or {'unknown_worker'}; with 'accepted' {outcome, description, number evicted, for the tenant's own budget,
-- evicted keys of this worker}; a description is names and values in turn.
local key, ticket, fence = order.key, order.ticket, integer(order.fence)

local function accepted(evicted, evicted_own, drop_keys)
  local entry, scopes, tenant_epoch, model_epoch = entry_of(key), scopes_of(key), 0, 0
  for _, scope in ipairs(scopes) do
    if string.sub(scope, 1, 7) == 'tenant:' then
      tenant_epoch = epoch_of(scope)
    elseif string.sub(scope, 1, 6) == 'model:' then
      model_epoch = epoch_of(scope)
    end
  end
  call('SET', base .. 'life', order.life, 'NX')
  local description = { 'key', key, 'scopes', scopes, 'life', call('GET', base .. 'life') }
  put(description, 'epochs', { integer(tenant_epoch), integer(model_epoch) })
  for _, name in ipairs({ 'kind', 'tokens', 'size', 'fence', 'ticket' }) do
    put(description, name, part(entry, name))
  end
  return { 'accepted', description, evicted, evicted_own, drop_keys }
end

local entry = entry_of(key)
local again = is_made_by(entry, ticket, fence)
local of_key, kind, tokens, of_fence, lease, dead = ticket_parts(ticket)
if not again then
  if of_key ~= key or of_fence ~= fence then
    return { 'fenced' }
  end
  if dead == 'dead' then
    return { 'invalidated' }
  end
end
if expiry('workers', order.worker) == 0 then
  return { 'unknown_worker' }
end
if again and holders_of(entry)[order.worker] then
  return accepted(0, 0, {})
end

local tenant = again and part(entry, 'tenant') or string.match(call('HGET', base .. 'scopes', key), 'tenant:%S+')
local evicted = victims(tenant, again and tonumber(part(entry, 'size')) or order.size, key)
if not evicted then
  if not again then
    end_ticket(ticket)
  end
  return { 'over_budget' }
end
local drop_keys = evict(evicted, order.worker, tenant)
if again then
  add_copy(key, entry, order.worker, order.tier)
else
  call('HDEL', base .. 'ticket_of', key)
  forget_ticket(ticket, lease)
  local record = { tokens = tokens, size = order.size, tenant = tenant, kind = kind, fence = order.fence, ticket = ticket }
  add_entry(key, record, order.worker, order.tier, expiry('leases', lease) ~= 0 and lease)
end
return accepted(#evicted, evicted.num_own, drop_keys)
