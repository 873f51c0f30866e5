-- Answers {'pinned' or 'unpinned', number of the scope's entries, promised bytes}, or {'over_limit', promised bytes}.
-- With `is_pinned` no segment that falls with the scope is evicted, otherwise that ends.
if order.budget_bytes > 0 then
  call('HSET', base .. 'budgets', order.scope, integer(order.budget_bytes))
end

local function is_tenant(scope)
  return string.sub(scope, 1, 7) == 'tenant:'
end

-- What all pins may keep, with that of one scope more: the budgets of tenants, and what is stored now of other documents.
local function promised_bytes(scope)
  local scopes, tenants, seen, promised = call('SMEMBERS', base .. 'pinned'), {}, {}, 0
  if scope then
    scopes[#scopes + 1] = scope
  end
  for _, each in ipairs(scopes) do
    if is_tenant(each) and not tenants[each] then
      tenants[each] = true
      promised = promised + budget_of(each)
    end
  end
  for _, each in ipairs(scopes) do
    for _, key in ipairs(is_tenant(each) and {} or call('SMEMBERS', base .. 'scope:' .. each)) do
      local entry = call('HMGET', base .. 'entry:' .. key, 'kind', 'tenant', 'size')
      if not seen[key] and entry[1] == 'segment' and not tenants[entry[2]] then
        seen[key] = true
        promised = promised + tonumber(entry[3]) * call('HLEN', base .. 'tiers:' .. key)
      end
    end
  end
  return promised
end

if order.is_pinned and call('SISMEMBER', base .. 'pinned', order.scope) == 0 then
  local promised = promised_bytes(order.scope)
  if promised > order.pin_limit_bytes then
    return { 'over_limit', integer(promised) }
  end
end
call(order.is_pinned and 'SADD' or 'SREM', base .. 'pinned', order.scope)
has_pins = call('EXISTS', base .. 'pinned') == 1
local found = 0
for _, key in ipairs(call('SMEMBERS', base .. 'scope:' .. order.scope)) do
  if published(key) then
    settle(key)
    found = found + 1
  end
end
return { order.is_pinned and 'pinned' or 'unpinned', found, integer(promised_bytes()) }
