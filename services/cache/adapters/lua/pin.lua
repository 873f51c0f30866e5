-- The number of the scope's entries. With `is_pinned` nothing that falls with it is evicted, otherwise that ends.
call(order.is_pinned and 'SADD' or 'SREM', base .. 'pinned', order.scope)
has_pins = call('EXISTS', base .. 'pinned') == 1
local found = 0
for _, key in ipairs(call('SMEMBERS', base .. 'scope:' .. order.scope)) do
  if published(key) then
    settle(key)
    found = found + 1
  end
end
return found
