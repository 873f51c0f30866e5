-- Answers {'ok', entry...}, {'stale', scope, epoch, ...} or {'unknown_lease'}. An entry is {'superseded'}, {'live'},
-- {'hit', key, worker, address, tier, ...}, {'cold', ticket, fence, seconds} or {'pending', seconds}.
local stale = { 'stale' }
local is_stale = false
for scope, epoch in pairs(order.epochs) do
  is_stale = is_stale or epoch_of(scope) ~= epoch
  stale[#stale + 1] = scope
  stale[#stale + 1] = integer(epoch_of(scope))
end
if is_stale then
  return stale
end
local lease_ends = expiry('leases', order.lease)
if order.extends and lease_ends == 0 then
  return { 'unknown_lease' }
end
lease_ends = math.max(lease_ends, now + order.lease_seconds)
call('ZADD', base .. 'leases', lease_ends, order.lease)
call('ZADD', base .. 'shares', now, order.tenant)
if order.budget_bytes > 0 then
  call('HSET', base .. 'budgets', order.tenant, integer(order.budget_bytes))
end

local function give_ticket(wanted)
  local fence = integer(next_sequence())
  local ticket = order.nonce .. '-' .. fence
  call('HSET', base .. 'ticket:' .. ticket, 'key', wanted.key, 'kind', wanted.kind, 'tokens', wanted.tokens,
    'fence', fence, 'lease', order.lease, 'dead', '0')
  call('ZADD', base .. 'tickets', math.max(lease_ends, now + order.limits.ticket_seconds), ticket)
  call('HSET', base .. 'ticket_of', wanted.key, ticket)
  call('SADD', base .. 'lease_tickets:' .. order.lease, ticket)
end

local sighted = {}
-- Whether an absent key is to be captured; an order counts once for each.
local function admits(wanted)
  if order.admit_all or order.limits.min_uses <= 1 then
    return true
  end
  local key = wanted.key
  if not sighted[key] then
    sighted[key] = call('HINCRBY', base .. 'sightings', key, 1)
    call('ZADD', base .. 'sighted', now, key)
    if call('ZCARD', base .. 'sighted') > order.max_sightings then
      call('HDEL', base .. 'sightings', call('ZPOPMIN', base .. 'sighted')[1])
    end
  end
  return wanted.kind == 'prefix' or sighted[key] >= order.limits.min_uses
end

local addresses = {}
local function address_of(worker)
  addresses[worker] = addresses[worker] or call('HGET', base .. 'addresses', worker)
  return addresses[worker]
end

local function hit(key)
  if lease_entry(order.lease, key) then
    use(key)
  end
  local reply = { 'hit', key }
  local tiers = call('HGETALL', base .. 'tiers:' .. key)
  for i = 1, #tiers, 2 do
    reply[#reply + 1] = tiers[i]
    reply[#reply + 1] = address_of(tiers[i])
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

local function is_superseded(wanted)
  for _, document in ipairs(wanted.documents) do
    local digest = call('HGET', base .. 'record:' .. document[1], 'digest')
    if digest and digest ~= document[2] then
      return true
    end
  end
  return false
end

local function link_documents(wanted)
  for _, document in ipairs(wanted.documents) do
    link(wanted.key, document[1])
    local tags = call('HGET', base .. 'record:' .. document[1], 'tag_scopes')
    for _, tag in ipairs(tags and cjson.decode(tags) or {}) do
      link(wanted.key, tag)
    end
  end
end

local function plan_one(wanted)
  if is_superseded(wanted) then
    return { 'superseded' }
  end
  local resident = published(wanted.key)
  if not resident and wanted.public_key ~= cjson.null and published(wanted.public_key) then
    return hit(wanted.public_key)
  end
  if not resident and call('HEXISTS', base .. 'ticket_of', wanted.key) == 0 then
    if not admits(wanted) then
      return { 'live' }
    end
    give_ticket(wanted)
    link(wanted.key, order.tenant)
    link(wanted.key, order.model)
  end
  link_documents(wanted)
  return resident and hit(wanted.key) or ticketed(wanted.key)
end

local reply = { 'ok' }
for _, wanted in ipairs(order.wanted) do
  reply[#reply + 1] = plan_one(wanted)
end
return reply
