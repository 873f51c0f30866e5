-- Answers {'pinned' or 'unpinned', number of the scope's entries, promised bytes}, or {'over_limit', promised bytes}.
-- With `is_pinned` no segment that falls with the scope is evicted, otherwise that ends.
if order.budget_bytes > 0 then
  call('HSET', base .. 'budgets', order.scope, integer(order.budget_bytes))
end

local function is_tenant(scope)
  return string.sub(scope, 1, 7) == 'tenant:'
end

-- key -> entry
local function published_of(scope)
  local found = {}
  for key, entry in pairs(read('entries', call('SMEMBERS', base .. 'scope:' .. scope))) do
    found[key] = entry or nil
  end
  return found
end

-- What all pins may keep, with that of one scope more: the budgets of tenants, and what is stored now of other documents.
local function promised_bytes(scope)
  local scopes, tenants, seen, promised = call('SMEMBERS', base .. 'pinned'), {}, {}, 0
  if scope then
    append(scopes, scope)
  end
  for _, each in ipairs(scopes) do
    if is_tenant(each) and not tenants[each] then
      tenants[each] = true
      promised = promised + budget_of(each)
    end
  end
  for _, each in ipairs(scopes) do
    for key, entry in pairs(is_tenant(each) and {} or published_of(each)) do
      if not seen[key] and part(entry, 'kind') == 'segment' and not tenants[part(entry, 'tenant')] then
        seen[key] = true
        promised = promised + held_bytes(entry)
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
local keys = {}
for key in pairs(published_of(order.scope)) do
  append(keys, key)
end
settle(keys)
return { order.is_pinned and 'pinned' or 'unpinned', #keys, integer(promised_bytes()) }
