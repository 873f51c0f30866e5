-- Answers {id, address, description} of every living worker.
local found = {}
for _, worker in ipairs(call('ZRANGE', base .. 'workers', 0, -1)) do
  found[#found + 1] = {
    worker, call('HGET', base .. 'addresses', worker), call('HGET', base .. 'descriptions', worker),
  }
end
return found
