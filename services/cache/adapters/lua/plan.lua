-- Answers {'ok', entry...}, {'stale', tenant epoch, model epoch} or {'unknown_lease'}. An entry is
-- {'hit', worker, address, tier, ...}, {'cold', ticket, fence, seconds} or {'pending', seconds}.
local tenant_epoch, model_epoch = epoch_of(order.tenant), epoch_of(order.model)
if tenant_epoch ~= order.epochs[1] or model_epoch ~= order.epochs[2] then
  return { 'stale', integer(tenant_epoch), integer(model_epoch) }
end
local lease_ends = expiry('leases', order.lease)
if order.extends and lease_ends == 0 then
  return { 'unknown_lease' }
end
lease_ends = math.max(lease_ends, now + order.lease_seconds)
call('ZADD', base .. 'leases', lease_ends, order.lease)

local function give_ticket(wanted)
  local fence = integer(next_sequence())
  local ticket = order.nonce .. '-' .. fence
  call('HSET', base .. 'ticket:' .. ticket, 'key', wanted.key, 'kind', wanted.kind, 'tokens', wanted.tokens,
    'fence', fence, 'lease', order.lease, 'dead', '0')
  call('ZADD', base .. 'tickets', math.max(lease_ends, now + order.limits.ticket_seconds), ticket)
  call('HSET', base .. 'ticket_of', wanted.key, ticket)
  call('SADD', base .. 'lease_tickets:' .. order.lease, ticket)
end

local function hit(key)
  call('ZADD', base .. 'used', now, key)
  lease_entry(order.lease, key)
  local reply = { 'hit' }
  local tiers = call('HGETALL', base .. 'tiers:' .. key)
  for i = 1, #tiers, 2 do
    reply[#reply + 1] = tiers[i]
    reply[#reply + 1] = call('HGET', base .. 'addresses', tiers[i])
    reply[#reply + 1] = tiers[i + 1]
  end
  return reply
end

local function ticketed(key)
  local ticket = call('HGET', base .. 'ticket_of', key)
  local seconds = string.format('%.17g', expiry('tickets', ticket) - now)
  local fields = call('HMGET', base .. 'ticket:' .. ticket, 'lease', 'fence')
  if fields[1] == order.lease then
    return { 'cold', ticket, fields[2], seconds }
  end
  return { 'pending', seconds }
end

local reply = { 'ok' }
for _, wanted in ipairs(order.wanted) do
  local resident = published(wanted.key)
  if not resident and call('HEXISTS', base .. 'ticket_of', wanted.key) == 0 then
    give_ticket(wanted)
  end
  link(wanted.key, order.tenant)
  link(wanted.key, order.model)
  if wanted.document ~= cjson.null then
    link(wanted.key, wanted.document)
  end
  reply[#reply + 1] = resident and hit(wanted.key) or ticketed(wanted.key)
end
return reply
