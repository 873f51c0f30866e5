-- Answers {outcome, version, number of entries, copies}.
local name = base .. 'record:' .. order.scope
local known = call('HMGET', name, 'digest', 'title', 'tags', 'version')
local is_known = known[1] ~= false
if is_known and known[1] == order.digest and known[2] == order.title and known[3] == order.tags then
  return { 'unchanged', known[4], 0, {} }
end
local version = next_sequence()
local removed = remove_scope(order.scope, version)
-- The registration tells the epoch now.
drop_epoch(order.scope)
trim_past()
call('HSET', name, 'tenant', order.tenant, 'id', order.id, 'title', order.title, 'tags', order.tags,
  'tag_scopes', order.tag_scopes, 'digest', order.digest, 'tokens', order.tokens, 'version', integer(version))
call('SADD', base .. 'records:' .. order.tenant, order.scope)
call('ZADD', base .. 'ids:' .. order.tenant, 0, order.id)
call('HSET', base .. 'document_of:' .. order.tenant, order.id, order.scope)
for _, tag in ipairs(cjson.decode(order.tag_scopes)) do
  call('SADD', base .. 'records:' .. tag, order.scope)
end
return { is_known and 'replaced' or 'created', integer(version), removed[1], removed[3] }
