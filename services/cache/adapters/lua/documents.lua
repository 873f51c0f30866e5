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
  local fields = call('HMGET', base .. 'record:' .. scope, 'id', 'title', 'tags', 'digest', 'tokens', 'version')
  if fields[1] then
    found[#found + 1] = fields
  end
end
return found
