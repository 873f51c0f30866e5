-- Tables of the directory and the small steps that keep them in agreement; memory_state.py has the same steps under
-- the same names. Each script is this file followed by its own. KEYS[1] is the start of every key, with the hash tag
-- that puts all of the directory into one slot; ARGV[1] is a JSON object.
--
--   sequence, bytes, clock     counters; clock: the highest score that was ever evicted
--   bytes_of, budgets          scope of a tenant -> bytes of its copies, and its own budget
--   life                       random; another one where the memory of invalidations was lost
--   epochs                     scope -> sequence number of its last invalidation
--   links:K                    scopes that a published key falls with beyond its receipts
--   past, floor                epochs of documents and tags (scope) and links (K|scope) by sequence number; below the
--                              floor they are forgotten, and no receipt is good
--   born                       published keys by fence
--   entries                    published key -> what PARTS lists, with spaces between
--   idle:T                     a tenant's published keys that are neither leased nor pinned, by score
--   shares                     tenants that have a share, by last plan
--   pinned                     scopes
--   ghosts, own_ghosts         evicted keys by the number of their eviction (`evicted` counts them), for the whole budget and
--                              for their tenant's own; ghost_sizes, ghost_bytes: of the former, in all copies
--   evictors, evictions        'evictor victim' by rank, and 'entries bytes tokens' of each
--   sightings, sighted         how often absent keys were planned, and when last
--   tickets                    expiry
--   owned                      ticket -> 'key kind tokens fence lease', and ' dead' once its key was invalidated
--   ticket_of                  key -> live ticket
--   leases                     expiry; lease_tickets:L; lease_keys:L (key -> birth of the entry, which may be gone)
--   workers                    expiry; addresses, descriptions, held:W (key -> published at), marked:W (key -> marked at)
--   scopes, scope:S            key -> what it falls with, with spaces between; and its inverse
--   current                    a registered document's scope -> its digest, and the scopes of its tags, with spaces between
--   record:D                   the rest of it: tenant, id, title, tags, tokens, version
--   records:S                  document scopes of a tenant or tag
--   ids:T, document_of:T       a tenant's document ids in order, and their scopes
--
-- A plan names many keys: what it reads and writes of all of them lies in few hashes, and goes in a call for each.
local base = KEYS[1]
local order = cjson.decode(ARGV[1])
local call = redis.call

-- birth: a number of its own for each time that a key is published; protected: how many leases protect it. Behind these
-- come the holders, {worker: tier of its copy} as JSON.
local PARTS = {
  birth = 1, tokens = 2, size = 3, tenant = 4, kind = 5, fence = 6, ticket = 7, uses = 8, score = 9, protected = 10,
}

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

local sequence = tonumber(call('GET', base .. 'sequence') or '0')
local function raise_sequence(floor)
  if floor > sequence then
    sequence = floor
    call('SET', base .. 'sequence', integer(sequence))
  end
end

local function next_sequence()
  raise_sequence(math.max(sequence + 1, math.floor(now * 1e6)))
  return sequence
end

-- Lua can pass some thousand values in one call.
local PASSED_AT_ONCE = 1000

-- The values of these fields of a hash: field -> value, or false.
local function read(hash, fields)
  local found = {}
  for first = 1, #fields, PASSED_AT_ONCE do
    local values = call('HMGET', base .. hash, unpack(fields, first, math.min(first + PASSED_AT_ONCE - 1, #fields)))
    for i, value in ipairs(values) do
      found[fields[first + i - 1]] = value
    end
  end
  return found
end

-- One command with all of these values, unless there are none.
local function tell(command, name, values)
  for first = 1, #values, PASSED_AT_ONCE do
    call(command, base .. name, unpack(values, first, math.min(first + PASSED_AT_ONCE - 1, #values)))
  end
end

-- The same for each of several tables whose names start alike: rest of the name -> values.
local function tell_each(command, start, values_of)
  for name, values in pairs(values_of) do
    tell(command, start .. name, values)
  end
end

local function append(list, value)
  list[#list + 1] = value
end

-- Of a list of fields and values, scores and members, and so on.
local function put(list, first, second)
  local length = #list
  list[length + 1] = first
  list[length + 2] = second
end

local function list_of(lists, name)
  lists[name] = lists[name] or {}
  return lists[name]
end

-- What HGETALL answers: field -> value.
local function pairs_of(answer)
  local found = {}
  for i = 1, #answer, 2 do
    found[answer[i]] = answer[i + 1]
  end
  return found
end

local function entry_of(key)
  return call('HGET', base .. 'entries', key)
end

local function part(entry, name)
  return string.match(entry, '^' .. string.rep('%S+ ', PARTS[name] - 1) .. '(%S+)')
end

-- {worker = tier}
local function holders_of(entry)
  return cjson.decode(string.match(entry, '^' .. string.rep('%S+ ', 10) .. '(.+)$'))
end

local function set_holders(key, entry, holders)
  local others = string.match(entry, '^' .. string.rep('%S+ ', 10))
  call('HSET', base .. 'entries', key, others .. cjson.encode(holders))
end

local has_pins = call('EXISTS', base .. 'pinned') == 1

-- A list of what a key falls with.
local function scopes_of(key)
  local scopes = {}
  for scope in string.gmatch(call('HGET', base .. 'scopes', key) or '', '%S+') do
    append(scopes, scope)
  end
  return scopes
end

-- Snapshots are not: every prompt with a pinned document would leave one that stays for ever.
local function is_pinned(key, entry)
  if has_pins and part(entry, 'kind') == 'segment' then
    for _, scope in ipairs(scopes_of(key)) do
      if call('SISMEMBER', base .. 'pinned', scope) == 1 then
        return true
      end
    end
  end
  return false
end

local function set_busy(key, entry)
  call('ZREM', base .. 'idle:' .. part(entry, 'tenant'), key)
end

-- Let published keys be evicted, or not, as leases and pins have it.
local function settle(keys)
  for key, entry in pairs(read('entries', keys)) do
    if part(entry, 'protected') ~= '0' or is_pinned(key, entry) then
      set_busy(key, entry)
    else
      call('ZADD', base .. 'idle:' .. part(entry, 'tenant'), part(entry, 'score'), key)
    end
  end
end

local function is_over_age(fence)
  local seconds = order.limits.entry_ttl_seconds
  return seconds > 0 and fence <= (now - seconds) * 1e6
end

local function unlink(key)
  for _, scope in ipairs(scopes_of(key)) do
    call('SREM', base .. 'scope:' .. scope, key)
  end
  call('HDEL', base .. 'scopes', key)
end

local function end_lease(lease)
  local births = pairs_of(call('HGETALL', base .. 'lease_keys:' .. lease))
  local keys, changed, idle = {}, {}, {}
  for key in pairs(births) do
    append(keys, key)
  end
  for key, entry in pairs(read('entries', keys)) do
    local others, birth, tenant, score, protected, holders =
      string.match(entry or '', '^((%S+) %S+ %S+ (%S+) %S+ %S+ %S+ %S+ (%S+)) (%S+) (.+)$')
    if birth == births[key] then
      local left = protected - 1
      put(changed, key, others .. ' ' .. left .. ' ' .. holders)
      if left == 0 and not is_pinned(key, entry) then
        put(list_of(idle, tenant), score, key)
      end
    end
  end
  tell('HSET', 'entries', changed)
  tell_each('ZADD', 'idle:', idle)
  call('DEL', base .. 'lease_keys:' .. lease, base .. 'lease_tickets:' .. lease)
  call('ZREM', base .. 'leases', lease)
end

-- key, kind, tokens, fence, lease, dead
local function ticket_parts(ticket)
  local owned = call('HGET', base .. 'owned', ticket)
  if owned then
    return string.match(owned, '^(%S+) (%S+) (%S+) (%S+) (%S+) ?(%S*)$')
  end
end

local function forget_ticket(ticket, lease)
  call('SREM', base .. 'lease_tickets:' .. lease, ticket)
  call('HDEL', base .. 'owned', ticket)
  call('ZREM', base .. 'tickets', ticket)
end

local function end_ticket(ticket)
  local key, _, _, _, lease = ticket_parts(ticket)
  forget_ticket(ticket, lease)
  if call('HGET', base .. 'ticket_of', key) == ticket then
    call('HDEL', base .. 'ticket_of', key)
    unlink(key)
  end
end

-- greedy_dual_size_frequency of domain/eviction.py
local clock = tonumber(call('GET', base .. 'clock') or '0')
local function score_of(uses, tokens, size)
  return string.format('%.17g', clock + uses * tokens / size)
end

local function count_bytes(entry, sign)
  local change, tenant = integer(sign * part(entry, 'size')), part(entry, 'tenant')
  call('INCRBY', base .. 'bytes', change)
  if call('HINCRBY', base .. 'bytes_of', tenant, change) == 0 then
    call('HDEL', base .. 'bytes_of', tenant)
  end
end

-- Forget a holder, and the entry with its last one.
local function remove_copy(key, worker)
  local entry = entry_of(key)
  local holders = holders_of(entry)
  holders[worker] = nil
  call('HDEL', base .. 'held:' .. worker, key)
  count_bytes(entry, -1)
  if next(holders) then
    set_holders(key, entry, holders)
  else
    set_busy(key, entry)
    call('HDEL', base .. 'entries', key)
    call('ZREM', base .. 'born', key)
    unlink(key)
  end
end

-- Its copies are added to `copies`, four values each: key, worker, tier, size.
local function remove_entry(key, entry, copies)
  local size = part(entry, 'size')
  for worker, tier in pairs(holders_of(entry)) do
    put(copies, key, worker)
    put(copies, tier, size)
    call('HSET', base .. 'marked:' .. worker, key, now)
    remove_copy(key, worker)
  end
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
    remove_entry(key, entry_of(key), {})
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
