-- Tables of the directory and the small steps that keep them in agreement; memory_state.py has the same steps under
-- the same names. Each script is this file followed by its own. KEYS[1] carries the hash tag that puts every key of
-- the directory into one slot; ARGV[1] is a JSON object.
--
--   sequence, bytes            counters
--   epochs                     scope -> sequence number of its last invalidation
--   entries                    published keys
--   entry:K                    kind, tokens, size, fence, ticket of a published key
--   tiers:K                    worker -> tier of its copy
--   pins:K                     leases that protect K
--   idle                       unleased published keys by last use
--   used                       last use of every published key
--   tickets, ticket:T          expiry; key, kind, tokens, fence, lease, dead
--   ticket_of                  key -> live ticket
--   leases                     expiry; lease_keys:L, lease_tickets:L
--   workers                    expiry; addresses, held:W (key -> published at), marked:W (key -> marked at)
--   scopes:K, scope:S          what a key falls with, and its inverse
local base = KEYS[1] .. ':'
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

local function lease_entry(lease, key)
  call('SADD', base .. 'lease_keys:' .. lease, key)
  call('SADD', base .. 'pins:' .. key, lease)
  call('ZREM', base .. 'idle', key)
end

local function end_lease(lease)
  for _, key in ipairs(call('SMEMBERS', base .. 'lease_keys:' .. lease)) do
    call('SREM', base .. 'pins:' .. key, lease)
    if call('EXISTS', base .. 'pins:' .. key) == 0 then
      call('ZADD', base .. 'idle', call('ZSCORE', base .. 'used', key), key)
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
  call('HSET', base .. 'entry:' .. key, 'kind', entry.kind, 'tokens', entry.tokens, 'size', integer(entry.size),
    'fence', integer(entry.fence), 'ticket', entry.ticket)
  call('ZADD', base .. 'used', now, key)
  call('ZADD', base .. 'idle', now, key)
end

local function size_of(key)
  return tonumber(call('HGET', base .. 'entry:' .. key, 'size'))
end

local function used_bytes()
  return tonumber(call('GET', base .. 'bytes') or '0')
end

local function add_copy(key, worker, tier)
  call('HSET', base .. 'tiers:' .. key, worker, tier)
  call('HSET', base .. 'held:' .. worker, key, now)
  call('HDEL', base .. 'marked:' .. worker, key)
  call('INCRBY', base .. 'bytes', integer(size_of(key)))
end

local function remove_copy(key, worker)
  call('HDEL', base .. 'tiers:' .. key, worker)
  call('HDEL', base .. 'held:' .. worker, key)
  call('DECRBY', base .. 'bytes', integer(size_of(key)))
  if call('EXISTS', base .. 'tiers:' .. key) == 0 then
    for _, lease in ipairs(call('SMEMBERS', base .. 'pins:' .. key)) do
      call('SREM', base .. 'lease_keys:' .. lease, key)
    end
    call('DEL', base .. 'entry:' .. key, base .. 'pins:' .. key)
    call('SREM', base .. 'entries', key)
    call('ZREM', base .. 'idle', key)
    call('ZREM', base .. 'used', key)
    unlink(key)
  end
end

local function remove_entry(key)
  for _, worker in ipairs(call('HKEYS', base .. 'tiers:' .. key)) do
    call('HSET', base .. 'marked:' .. worker, key, now)
    remove_copy(key, worker)
  end
end

local function remove_scope(scope, epoch)
  call('HSET', base .. 'epochs', scope, integer(epoch))
  local removed = 0
  for _, key in ipairs(call('SMEMBERS', base .. 'scope:' .. scope)) do
    if published(key) then
      remove_entry(key)
      removed = removed + 1
    else
      kill_ticket(key)
    end
  end
  return removed
end

-- The keys to evict before `size` bytes fit, least recently used first; nil when they cannot.
local function victims(size, spared)
  local missing = used_bytes() + size - order.limits.budget_bytes
  local found, first = {}, 0
  while missing > 0 do
    local page = call('ZRANGE', base .. 'idle', first, first + 99)
    if #page == 0 then
      return nil
    end
    for _, key in ipairs(page) do
      if missing > 0 and key ~= spared then
        found[#found + 1] = key
        missing = missing - size_of(key) * call('HLEN', base .. 'tiers:' .. key)
      end
    end
    first = first + 100
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
