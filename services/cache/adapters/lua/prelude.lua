-- Tables of the directory and the small steps that keep them in agreement; memory_state.py has the same steps under
-- the same names. Each script is this file followed by its own. KEYS[1] is the start of every key, with the hash tag
-- that puts all of the directory into one slot; ARGV[1] is a JSON object.
--
--   sequence, bytes            counters
--   bytes_of, budgets          scope of a tenant -> bytes of its copies, and its own budget
--   epochs                     scope -> sequence number of its last invalidation
--   entries                    published keys
--   entry:K                    kind, tenant, tokens, size, fence, ticket of a published key
--   tiers:K                    worker -> tier of its copy
--   pins:K                     leases that protect K
--   idle, idle:T               unleased published keys by last use, of all and of one tenant
--   used                       last use of every published key
--   tickets, ticket:T          expiry; key, kind, tokens, fence, lease, dead
--   ticket_of                  key -> live ticket
--   leases                     expiry; lease_keys:L, lease_tickets:L
--   workers                    expiry; addresses, held:W (key -> published at), marked:W (key -> marked at)
--   scopes:K, scope:S          what a key falls with, and its inverse
--   record:D                   a registered document: tenant, id, title, tags, digest, tokens, version
--   records:S                  document scopes of a tenant or tag
--   ids:T, document_of:T       a tenant's document ids in order, and their scopes
local base = KEYS[1]
local order = cjson.decode(ARGV[1])
local call = redis.call

local now = order.now
if now == cjson.null then
  local time = call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function integer(number)
  return string.format('%.0f', number)
end

local function expiry(zset, member)
  return tonumber(call('ZSCORE', base .. zset, member) or '0')
end

local function epoch_of(scope)
  return tonumber(call('HGET', base .. 'epochs', scope) or '0')
end

local function raise_sequence(floor)
  local sequence = math.max(tonumber(call('GET', base .. 'sequence') or '0'), floor)
  call('SET', base .. 'sequence', integer(sequence))
  return sequence
end

local function next_sequence()
  local last = tonumber(call('GET', base .. 'sequence') or '0')
  return raise_sequence(math.max(last + 1, math.floor(now * 1e6)))
end

local function published(key)
  return call('SISMEMBER', base .. 'entries', key) == 1
end

local function link(key, scope)
  call('SADD', base .. 'scopes:' .. key, scope)
  call('SADD', base .. 'scope:' .. scope, key)
end

local function unlink(key)
  for _, scope in ipairs(call('SMEMBERS', base .. 'scopes:' .. key)) do
    call('SREM', base .. 'scope:' .. scope, key)
  end
  call('DEL', base .. 'scopes:' .. key)
end

local function tenant_of(key)
  for _, scope in ipairs(call('SMEMBERS', base .. 'scopes:' .. key)) do
    if string.sub(scope, 1, 7) == 'tenant:' then
      return scope
    end
  end
end

local function set_idle(key)
  local used = call('ZSCORE', base .. 'used', key)
  call('ZADD', base .. 'idle', used, key)
  call('ZADD', base .. 'idle:' .. call('HGET', base .. 'entry:' .. key, 'tenant'), used, key)
end

local function unset_idle(key)
  call('ZREM', base .. 'idle', key)
  call('ZREM', base .. 'idle:' .. call('HGET', base .. 'entry:' .. key, 'tenant'), key)
end

local function lease_entry(lease, key)
  call('SADD', base .. 'lease_keys:' .. lease, key)
  call('SADD', base .. 'pins:' .. key, lease)
  unset_idle(key)
end

local function end_lease(lease)
  for _, key in ipairs(call('SMEMBERS', base .. 'lease_keys:' .. lease)) do
    call('SREM', base .. 'pins:' .. key, lease)
    if call('EXISTS', base .. 'pins:' .. key) == 0 then
      set_idle(key)
    end
  end
  call('DEL', base .. 'lease_keys:' .. lease, base .. 'lease_tickets:' .. lease)
  call('ZREM', base .. 'leases', lease)
end

local function forget_ticket(ticket)
  call('SREM', base .. 'lease_tickets:' .. call('HGET', base .. 'ticket:' .. ticket, 'lease'), ticket)
  call('DEL', base .. 'ticket:' .. ticket)
  call('ZREM', base .. 'tickets', ticket)
end

local function end_ticket(ticket)
  local key = call('HGET', base .. 'ticket:' .. ticket, 'key')
  forget_ticket(ticket)
  if call('HGET', base .. 'ticket_of', key) == ticket then
    call('HDEL', base .. 'ticket_of', key)
    unlink(key)
  end
end

local function kill_ticket(key)
  call('HSET', base .. 'ticket:' .. call('HGET', base .. 'ticket_of', key), 'dead', '1')
  call('HDEL', base .. 'ticket_of', key)
  unlink(key)
end

local function add_entry(key, entry)
  call('SADD', base .. 'entries', key)
  call('HSET', base .. 'entry:' .. key, 'kind', entry.kind, 'tenant', entry.tenant, 'tokens', entry.tokens,
    'size', integer(entry.size), 'fence', integer(entry.fence), 'ticket', entry.ticket)
  call('ZADD', base .. 'used', now, key)
  set_idle(key)
end

local function size_of(key)
  return tonumber(call('HGET', base .. 'entry:' .. key, 'size'))
end

local function used_bytes()
  return tonumber(call('GET', base .. 'bytes') or '0')
end

local function bytes_of(tenant)
  return tonumber(call('HGET', base .. 'bytes_of', tenant) or '0')
end

local function budget_of(tenant)
  local own = tonumber(call('HGET', base .. 'budgets', tenant) or '0')
  if own == 0 then
    own = order.limits.namespace_budget_bytes
  end
  return own == 0 and order.limits.budget_bytes or math.min(own, order.limits.budget_bytes)
end

local function count_bytes(key, sign)
  local fields = call('HMGET', base .. 'entry:' .. key, 'size', 'tenant')
  local change = integer(sign * tonumber(fields[1]))
  call('INCRBY', base .. 'bytes', change)
  if call('HINCRBY', base .. 'bytes_of', fields[2], change) == 0 then
    call('HDEL', base .. 'bytes_of', fields[2])
  end
end

local function has_room(tenant, size)
  return bytes_of(tenant) + size <= budget_of(tenant) and used_bytes() + size <= order.limits.budget_bytes
end

local function add_copy(key, worker, tier)
  call('HSET', base .. 'tiers:' .. key, worker, tier)
  call('HSET', base .. 'held:' .. worker, key, now)
  call('HDEL', base .. 'marked:' .. worker, key)
  count_bytes(key, 1)
end

local function remove_copy(key, worker)
  call('HDEL', base .. 'tiers:' .. key, worker)
  call('HDEL', base .. 'held:' .. worker, key)
  count_bytes(key, -1)
  if call('EXISTS', base .. 'tiers:' .. key) == 0 then
    for _, lease in ipairs(call('SMEMBERS', base .. 'pins:' .. key)) do
      call('SREM', base .. 'lease_keys:' .. lease, key)
    end
    unset_idle(key)
    call('DEL', base .. 'entry:' .. key, base .. 'pins:' .. key)
    call('SREM', base .. 'entries', key)
    call('ZREM', base .. 'used', key)
    unlink(key)
  end
end

-- Its copies are added to `copies`, four values each: key, worker, tier, size.
local function remove_entry(key, copies)
  local size = call('HGET', base .. 'entry:' .. key, 'size')
  local tiers = call('HGETALL', base .. 'tiers:' .. key)
  for i = 1, #tiers, 2 do
    for _, value in ipairs({ key, tiers[i], tiers[i + 1], size }) do
      copies[#copies + 1] = value
    end
    call('HSET', base .. 'marked:' .. tiers[i], key, now)
    remove_copy(key, tiers[i])
  end
end

local function remove_document(document)
  local fields = call('HMGET', base .. 'record:' .. document, 'tenant', 'id', 'tag_scopes')
  call('SREM', base .. 'records:' .. fields[1], document)
  call('ZREM', base .. 'ids:' .. fields[1], fields[2])
  call('HDEL', base .. 'document_of:' .. fields[1], fields[2])
  for _, tag in ipairs(cjson.decode(fields[3])) do
    call('SREM', base .. 'records:' .. tag, document)
  end
  call('DEL', base .. 'record:' .. document)
end

-- Forget the document of this scope, or all documents of this tenant or tag, as far as they were registered before the
-- epoch; their scopes.
local function remove_documents(scope, epoch)
  local found, removed = { scope }, {}
  if call('EXISTS', base .. 'record:' .. scope) == 0 then
    found = call('SMEMBERS', base .. 'records:' .. scope)
  end
  for _, document in ipairs(found) do
    if tonumber(call('HGET', base .. 'record:' .. document, 'version')) < epoch then
      remove_document(document)
      removed[#removed + 1] = document
    end
  end
  return removed
end

local function free_scope(scope, epoch, copies)
  call('HSET', base .. 'epochs', scope, integer(epoch))
  local removed = 0
  for _, key in ipairs(call('SMEMBERS', base .. 'scope:' .. scope)) do
    if published(key) then
      remove_entry(key, copies)
      removed = removed + 1
    else
      kill_ticket(key)
    end
  end
  return removed
end

-- {number of entries, number of documents, copies}
local function remove_scope(scope, epoch)
  local copies = {}
  local documents = remove_documents(scope, epoch)
  local removed = free_scope(scope, epoch, copies)
  for _, document in ipairs(documents) do
    if document ~= scope then
      removed = removed + free_scope(document, epoch, copies)
    end
  end
  return { removed, #documents, copies }
end

-- Adds to `found` what to evict of one index so that `missing` bytes become free, least recently used first; the bytes
-- that are still missing.
local function choose(index, missing, spared, found)
  local first = 0
  while missing > 0 do
    local page = call('ZRANGE', base .. index, first, first + 99)
    if #page == 0 then
      return missing
    end
    for _, key in ipairs(page) do
      if missing > 0 and key ~= spared and not found[key] then
        found[#found + 1] = key
        found[key] = true
        missing = missing - size_of(key) * call('HLEN', base .. 'tiers:' .. key)
      end
    end
    first = first + 100
  end
  return missing
end

-- The keys to evict before `size` bytes of a tenant fit, first for its own budget; nil when they cannot.
local function victims(tenant, size, spared)
  local found = {}
  local missing = bytes_of(tenant) + size - budget_of(tenant)
  local left = choose('idle:' .. tenant, missing, spared, found)
  if left > 0 then
    return nil
  end
  local freed = missing > 0 and missing - left or 0
  if choose('idle', used_bytes() + size - freed - order.limits.budget_bytes, spared, found) > 0 then
    return nil
  end
  return found
end

-- Remove what time has ended.
for _, lease in ipairs(call('ZRANGEBYSCORE', base .. 'leases', '-inf', now)) do
  end_lease(lease)
end
for _, ticket in ipairs(call('ZRANGEBYSCORE', base .. 'tickets', '-inf', now)) do
  end_ticket(ticket)
end
for _, worker in ipairs(call('ZRANGEBYSCORE', base .. 'workers', '-inf', now)) do
  for _, key in ipairs(call('HKEYS', base .. 'held:' .. worker)) do
    remove_copy(key, worker)
  end
  call('DEL', base .. 'marked:' .. worker)
  call('HDEL', base .. 'addresses', worker)
  call('ZREM', base .. 'workers', worker)
end
