-- How everything of a scope is removed, for scripts that do; it follows past.lua and goes before theirs.
local function kill_ticket(key)
  local ticket = call('HGET', base .. 'ticket_of', key)
  call('HSET', base .. 'owned', ticket, call('HGET', base .. 'owned', ticket) .. ' dead')
  call('HDEL', base .. 'ticket_of', key)
  unlink(key)
end

local function remove_document(document)
  local fields = call('HMGET', base .. 'record:' .. document, 'tenant', 'id')
  call('SREM', base .. 'records:' .. fields[1], document)
  call('ZREM', base .. 'ids:' .. fields[1], fields[2])
  call('HDEL', base .. 'document_of:' .. fields[1], fields[2])
  for tag in string.gmatch(call('HGET', base .. 'current', document), ' (%S+)') do
    call('SREM', base .. 'records:' .. tag, document)
  end
  call('HDEL', base .. 'current', document)
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
  advance_epoch(scope, epoch)
  local removed = 0
  for _, key in ipairs(call('SMEMBERS', base .. 'scope:' .. scope)) do
    local entry = entry_of(key)
    if entry then
      remove_entry(key, entry, copies)
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
