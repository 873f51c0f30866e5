-- Answers {outcome, version, number of entries, copies}.
local name = base .. 'record:' .. order.scope
local known = call('HMGET', name, 'title', 'tags', 'version')
local digest = string.match(call('HGET', base .. 'current', order.scope) or '', '^%S+')
if digest == order.digest and known[1] == order.title and known[2] == order.tags then
  return { 'unchanged', known[3], 0, {} }
end
local version = next_sequence()
local removed = remove_scope(order.scope, version)
-- The registration tells the epoch now.
drop_epoch(order.scope)
trim_past()
call('HSET', base .. 'current', order.scope, table.concat({ order.digest, unpack(order.tag_scopes) }, ' '))
call('HSET', name, 'tenant', order.tenant, 'id', order.id, 'title', order.title, 'tags', order.tags,
  'tokens', order.tokens, 'version', integer(version))
call('SADD', base .. 'records:' .. order.tenant, order.scope)
call('ZADD', base .. 'ids:' .. order.tenant, 0, order.id)
call('HSET', base .. 'document_of:' .. order.tenant, order.id, order.scope)
for _, tag in ipairs(order.tag_scopes) do
  call('SADD', base .. 'records:' .. tag, order.scope)
end
return { digest and 'replaced' or 'created', integer(version), removed[1], removed[3] }
