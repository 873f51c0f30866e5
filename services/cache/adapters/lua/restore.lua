-- Answers the refused keys.
local worker = order.worker

local function adopt(scope, epoch)
  if epoch > epoch_of(scope) then
    remove_scope(scope, epoch)
    trim_past()
  end
end

-- What a copy falls with, beside its tenant and model.
local function documents_of(record)
  local documents = call('SMEMBERS', base .. 'links:' .. record.key)
  for _, document in ipairs(record.documents) do
    append(documents, document)
  end
  return documents
end

local function stale(record)
  if epoch_of(record.tenant) ~= record.epochs[1] or epoch_of(record.model) ~= record.epochs[2] then
    return true
  end
  if is_over_age(record.fence) or record.fence <= tonumber(call('GET', base .. 'floor') or '0') then
    return true
  end
  for _, document in ipairs(documents_of(record)) do
    local version = tonumber(call('HGET', base .. 'record:' .. document, 'version') or '0')
    if math.max(epoch_of(document), version) > record.fence then
      return true
    end
  end
  return false
end

local function restored(record)
  local key = record.key
  if expiry('workers', worker) == 0 or call('HEXISTS', base .. 'marked:' .. worker, key) == 1 or stale(record) then
    return false
  end
  local resident = entry_of(key)
  if resident then
    if not is_made_by(resident, record.ticket, integer(record.fence)) then
      return false
    end
    if holders_of(resident)[worker] then
      return true
    end
  end
  if not has_room(record.tenant, record.size) then
    return false
  end
  local ticket = call('HGET', base .. 'ticket_of', key)
  if ticket then
    local _, _, _, _, lease = ticket_parts(ticket)
    call('HDEL', base .. 'ticket_of', key)
    forget_ticket(ticket, lease)
  end
  local scopes = documents_of(record)
  put(scopes, record.tenant, record.model)
  link(key, call('HGET', base .. 'scopes', key) or '', scopes, resident)
  tell_links()
  if resident then
    add_copy(key, resident, worker, record.tier)
  else
    add_entry(key, record, worker, record.tier)
  end
  return true
end

-- A directory that has lost its memory does not know what was invalidated before.
local life = call('GET', base .. 'life')
for _, record in ipairs(order.records) do
  if record.life == life then
    raise_sequence(math.max(record.fence, record.epochs[1], record.epochs[2]))
    adopt(record.tenant, record.epochs[1])
    adopt(record.model, record.epochs[2])
  end
end
local refused = {}
for _, record in ipairs(order.records) do
  if record.life ~= life or not restored(record) then
    append(refused, record.key)
  end
end
return refused
