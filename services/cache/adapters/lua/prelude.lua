-- Tables of the directory and the small steps that keep them in agreement; memory_state.py has the same steps under
-- the same names. Each script is this file followed by its own. KEYS[1] is the start of every key, with the hash tag
-- that puts all of the directory into one slot; ARGV[1] is a JSON object.
--
--   sequence, bytes, clock     counters; clock: the highest score that was ever evicted
--   bytes_of, budgets          scope of a tenant -> bytes of its copies, and its own budget
--   epochs                     scope -> sequence number of its last invalidation
--   born                       published keys by fence
--   entry:K                    kind, tenant, tokens, size, fence, ticket, uses, score of a published key
--   tiers:K                    worker -> tier of its copy
--   pins:K                     leases that protect K
--   idle:T                     a tenant's published keys that are neither leased nor pinned, by score
--   shares                     tenants that have a share, by last plan
--   pinned                     scopes
--   sightings, sighted         how often absent keys were planned, and when last
--   tickets, ticket:T          expiry; key, kind, tokens, fence, lease, dead
--   ticket_of                  key -> live ticket
--   leases                     expiry; lease_keys:L, lease_tickets:L
--   workers                    expiry; addresses, descriptions, held:W (key -> published at), marked:W (key -> marked at)
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
  return call('EXISTS', base .. 'entry:' .. key) == 1
end

local has_pins = call('EXISTS', base .. 'pinned') == 1

local function is_pinned(key)
  if has_pins then
    for _, scope in ipairs(call('SMEMBERS', base .. 'scopes:' .. key)) do
      if call('SISMEMBER', base .. 'pinned', scope) == 1 then
        return true
      end
    end
  end
  return false
end

local function set_busy(key)
  call('ZREM', base .. 'idle:' .. call('HGET', base .. 'entry:' .. key, 'tenant'), key)
end

-- Let an entry be evicted, or not, as leases and pins have it.
local function settle(key)
  if call('EXISTS', base .. 'pins:' .. key) == 1 or is_pinned(key) then
    set_busy(key)
  else
    local fields = call('HMGET', base .. 'entry:' .. key, 'tenant', 'score')
    call('ZADD', base .. 'idle:' .. fields[1], fields[2], key)
  end
end

local function is_over_age(fence)
  local seconds = order.limits.entry_ttl_seconds
  return seconds > 0 and fence <= (now - seconds) * 1e6
end

local function link(key, scope)
  call('SADD', base .. 'scopes:' .. key, scope)
  call('SADD', base .. 'scope:' .. scope, key)
  if has_pins and call('SISMEMBER', base .. 'pinned', scope) == 1 and published(key) then
    set_busy(key)
  end
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

-- Whether the lease is a new one for this entry.
local function lease_entry(lease, key)
  call('SADD', base .. 'lease_keys:' .. lease, key)
  set_busy(key)
  return call('SADD', base .. 'pins:' .. key, lease) == 1
end

local function end_lease(lease)
  for _, key in ipairs(call('SMEMBERS', base .. 'lease_keys:' .. lease)) do
    call('SREM', base .. 'pins:' .. key, lease)
    settle(key)
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

-- Count a use; greedy_dual_size_frequency of domain/eviction.py gives the score.
local clock = tonumber(call('GET', base .. 'clock') or '0')
local function use(key)
  local entry = call('HMGET', base .. 'entry:' .. key, 'uses', 'tokens', 'size')
  local uses = tonumber(entry[1]) + 1
  local score = clock + uses * tonumber(entry[2]) / tonumber(entry[3])
  call('HSET', base .. 'entry:' .. key, 'uses', integer(uses), 'score', string.format('%.17g', score))
end

-- Publish a key whose scopes are linked.
local function add_entry(key, entry)
  call('HSET', base .. 'entry:' .. key, 'kind', entry.kind, 'tenant', entry.tenant, 'tokens', entry.tokens,
    'size', integer(entry.size), 'fence', integer(entry.fence), 'ticket', entry.ticket, 'uses', '0')
  call('ZADD', base .. 'born', integer(entry.fence), key)
  use(key)
  settle(key)
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
    set_busy(key)
    call('DEL', base .. 'entry:' .. key, base .. 'pins:' .. key)
    call('ZREM', base .. 'born', key)
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

-- Remove what time has ended.
for _, lease in ipairs(call('ZRANGEBYSCORE', base .. 'leases', '-inf', now)) do
  end_lease(lease)
end
for _, ticket in ipairs(call('ZRANGEBYSCORE', base .. 'tickets', '-inf', now)) do
  end_ticket(ticket)
end
call('ZREMRANGEBYSCORE', base .. 'shares', '-inf', now - order.limits.share_seconds)
if order.limits.entry_ttl_seconds > 0 then
  local oldest = (now - order.limits.entry_ttl_seconds) * 1e6
  for _, key in ipairs(call('ZRANGEBYSCORE', base .. 'born', '-inf', oldest)) do
    remove_entry(key, {})
  end
end
for _, worker in ipairs(call('ZRANGEBYSCORE', base .. 'workers', '-inf', now)) do
  for _, key in ipairs(call('HKEYS', base .. 'held:' .. worker)) do
    remove_copy(key, worker)
  end
  call('DEL', base .. 'marked:' .. worker)
  call('HDEL', base .. 'addresses', worker)
  call('HDEL', base .. 'descriptions', worker)
  call('ZREM', base .. 'workers', worker)
end
