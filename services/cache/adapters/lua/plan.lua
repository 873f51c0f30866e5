-- ARGV[2] are the keys of all parts, ARGV[3] their public keys, of KEY_LENGTH characters each; a public key that is not
-- consulted is one that nothing has.
-- Answers {'ok', {holders, ...}, {worker, ...}, {address, ...}, answer...}, {'stale', scope, epoch, ...} or {'unknown_lease'},
-- as JSON: Redis makes every table within a table a buffer of 16 KiB of its own. Holders are {worker, tier, ...}. An answer
-- is a number n for a hit with the n-th holders, -n for one under the public key, else {'cold', ticket, fence, seconds},
-- {'pending', seconds}, {'superseded'} or {'live'}; behind 'cold' and 'live' come the cause of a miss and its missing bytes,
-- where the order finds out that a segment is absent.
local KEY_LENGTH = 64

local stale, is_stale = { 'stale' }, false
for scope, epoch in pairs(order.epochs) do
  local current = epoch_of(scope)
  is_stale = is_stale or current ~= epoch
  put(stale, scope, integer(current))
end
if is_stale then
  return cjson.encode(stale)
end
local lease_ends = expiry('leases', order.lease)
if order.extends and lease_ends == 0 then
  return cjson.encode({ 'unknown_lease' })
end
lease_ends = math.max(lease_ends, now + order.lease_seconds)
call('ZADD', base .. 'leases', lease_ends, order.lease)
call('ZADD', base .. 'shares', now, order.tenant)
if order.budget_bytes > 0 then
  call('HSET', base .. 'budgets', order.tenant, integer(order.budget_bytes))
end

local keys, public_keys, documents, absent, absent_public = {}, {}, {}, {}, {}
for i, wanted in ipairs(order.wanted) do
  local first, last = KEY_LENGTH * (i - 1) + 1, KEY_LENGTH * i
  keys[i], public_keys[i] = string.sub(ARGV[2], first, last), string.sub(ARGV[3], first, last)
  for _, document in ipairs(wanted[3]) do
    append(documents, document[1])
  end
end
local entries = read('entries', keys)
for i, key in ipairs(keys) do
  if not entries[key] then
    append(absent, key)
    append(absent_public, public_keys[i])
  end
end
local public_entries, ticket_of = read('entries', absent_public), read('ticket_of', absent)
local scopes, current = {}, {}
if #documents > 0 then
  scopes, current = read('scopes', keys), read('current', documents)
end
local leased = {}
if order.extends then
  leased = pairs_of(call('HGETALL', base .. 'lease_keys:' .. order.lease))
end

-- Scopes of documents and of their tags; false when another text is registered under one of their ids.
local function scopes_named_by(refs)
  local named = {}
  for _, document in ipairs(refs) do
    local digest, tags = string.match(current[document[1]] or '', '^(%S+)(.*)$')
    if digest and digest ~= document[2] then
      return false
    end
    append(named, document[1])
    for tag in string.gmatch(tags or '', '%S+') do
      append(named, tag)
    end
  end
  return named
end

local sighted = {}
-- Whether an absent key is to be captured; an order counts once for each.
local function admits(key, kind)
  if order.admit_all or order.limits.min_uses <= 1 then
    return true
  end
  if not sighted[key] then
    sighted[key] = call('HINCRBY', base .. 'sightings', key, 1)
    call('ZADD', base .. 'sighted', now, key)
    if call('ZCARD', base .. 'sighted') > order.max_sightings then
      call('HDEL', base .. 'sightings', call('ZPOPMIN', base .. 'sighted')[1])
    end
  end
  return kind == 'prefix' or sighted[key] >= order.limits.min_uses
end

local missed = {}
-- The answer, with why the key is absent.
local function with_miss(answer, key, kind)
  if kind == 'segment' and not missed[key] then
    missed[key] = true
    local miss = miss_of(key)
    put(answer, miss[1], miss[2])
  end
  return answer
end

local ticket_ends = math.max(lease_ends, now + order.limits.ticket_seconds)
local new = { owned = {}, ticket_of = {}, tickets = {}, of_lease = {}, entries = {}, lease_keys = {}, busy = {} }

local function give_ticket(key, kind, tokens)
  local fence = integer(next_sequence())
  local ticket = order.nonce .. '-' .. fence
  put(new.owned, ticket, table.concat({ key, kind, integer(tokens), fence, order.lease }, ' '))
  put(new.ticket_of, key, ticket)
  put(new.tickets, ticket_ends, ticket)
  append(new.of_lease, ticket)
  scopes[key] = link(key, '', { order.tenant, order.model }, false)
  ticket_of[key] = ticket
  return { 'cold', ticket, fence, string.format('%.17g', ticket_ends - now) }
end

local function known_ticket(ticket)
  local _, _, _, fence, lease = ticket_parts(ticket)
  local seconds = string.format('%.17g', expiry('tickets', ticket) - now)
  return lease == order.lease and { 'cold', ticket, fence, seconds } or { 'pending', seconds }
end

local all_holders, number_of = {}, {}
-- Lease an entry, unless this lease protects it already; the number of its holders.
local function hit(key, entry)
  local others, birth, tokens, size, tenant, uses, protected, holders =
    string.match(entry, '^((%S+) (%S+) (%S+) (%S+) %S+ %S+ %S+) (%S+) %S+ (%S+) (.+)$')
  if leased[key] ~= birth then
    leased[key] = birth
    uses = uses + 1
    local changed = others .. ' ' .. uses .. ' ' .. score_of(uses, tokens, size) .. ' ' .. protected + 1 .. ' ' .. holders
    put(new.entries, key, changed)
    put(new.lease_keys, key, birth)
    append(list_of(new.busy, tenant), key)
  end
  local number = number_of[holders]
  if not number then
    append(all_holders, holders)
    number = #all_holders
    number_of[holders] = number
  end
  return number
end

local answers = {}
local function plan_one(i, kind, tokens, documents)
  local key, public_key = keys[i], public_keys[i]
  local named = scopes_named_by(documents)
  if not named then
    return { 'superseded' }
  elseif not entries[key] and public_entries[public_key] then
    return -hit(public_key, public_entries[public_key])
  elseif not entries[key] and not ticket_of[key] and not admits(key, kind) then
    return with_miss({ 'live' }, key, kind)
  end
  local answer = answers[key]
  if not answer then
    if entries[key] then
      answer = hit(key, entries[key])
    elseif ticket_of[key] then
      answer = known_ticket(ticket_of[key])
    else
      answer = give_ticket(key, kind, tokens)
      answers[key] = { unpack(answer) }
      with_miss(answer, key, kind)
    end
    answers[key] = answers[key] or answer
  end
  if #named > 0 then
    scopes[key] = link(key, scopes[key] or '', named, entries[key])
  end
  return answer
end

local reply = { 'ok', {}, {}, {} }
for i, wanted in ipairs(order.wanted) do
  append(reply, plan_one(i, wanted[1], wanted[2], wanted[3]))
end
tell('HSET', 'owned', new.owned)
tell('HSET', 'ticket_of', new.ticket_of)
tell('ZADD', 'tickets', new.tickets)
tell('SADD', 'lease_tickets:' .. order.lease, new.of_lease)
tell('HSET', 'entries', new.entries)
tell('HSET', 'lease_keys:' .. order.lease, new.lease_keys)
tell_each('ZREM', 'idle:', new.busy)
tell_links()

local is_listed = {}
for i, holders in ipairs(all_holders) do
  reply[2][i] = {}
  for worker, tier in pairs(cjson.decode(holders)) do
    put(reply[2][i], worker, tier)
    if not is_listed[worker] then
      is_listed[worker] = true
      append(reply[3], worker)
    end
  end
end
if #reply[3] > 0 then
  reply[4] = call('HMGET', base .. 'addresses', unpack(reply[3]))
end
return cjson.encode(reply)
