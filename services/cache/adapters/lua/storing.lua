-- How entries and copies are added, and for what there is room; it follows prelude.lua and goes before scripts that add some.
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

local function has_room(tenant, size)
  return bytes_of(tenant) + size <= budget_of(tenant) and used_bytes() + size <= order.limits.budget_bytes
end

-- Of all copies.
local function held_bytes(entry)
  local num_holders = 0
  for _ in pairs(holders_of(entry)) do
    num_holders = num_holders + 1
  end
  return part(entry, 'size') * num_holders
end

-- Whether the bytes of an entry are those that this ticket was given for.
local function is_made_by(entry, ticket, fence)
  return entry and part(entry, 'ticket') == ticket and part(entry, 'fence') == fence
end

local function add_copy(key, entry, worker, tier)
  local holders = holders_of(entry)
  holders[worker] = tier
  set_holders(key, entry, holders)
  call('HSET', base .. 'held:' .. worker, key, now)
  call('HDEL', base .. 'marked:' .. worker, key)
  count_bytes(entry, 1)
end

-- Publish a key whose scopes are told, with its first copy, under the protection of this lease or of none.
local function add_entry(key, record, worker, tier, lease)
  local birth, size, fence = integer(next_sequence()), integer(record.size), integer(record.fence)
  local entry = table.concat({
    birth, integer(record.tokens), size, record.tenant, record.kind, fence, record.ticket, 1,
    score_of(1, record.tokens, record.size), lease and 1 or 0, '{}',
  }, ' ')
  if lease then
    call('HSET', base .. 'lease_keys:' .. lease, key, birth)
  end
  forget_ghost(key)
  call('ZADD', base .. 'born', fence, key)
  add_copy(key, entry, worker, tier)
  settle({ key })
end
