-- Answers the registered documents of `scopes`, or a tenant's page of ids behind `after`: six values each.
local scopes = order.scopes
if order.tenant ~= cjson.null then
  local first = order.after == '' and '-' or '(' .. order.after
  local ids = call('ZRANGEBYLEX', base .. 'ids:' .. order.tenant, first, '+', 'LIMIT', 0, order.limit)
  scopes = {}
  for _, id in ipairs(ids) do
    scopes[#scopes + 1] = call('HGET', base .. 'document_of:' .. order.tenant, id)
  end
end
local found = {}
for _, scope in ipairs(scopes) do
  local digest = string.match(call('HGET', base .. 'current', scope) or '', '^%S+')
  if digest then
    local fields = call('HMGET', base .. 'record:' .. scope, 'id', 'title', 'tags', 'tokens', 'version')
    append(fields, digest)
    append(found, fields)
  end
end
return found
