-- Answers {keys to drop, unknown keys}.
local worker = order.worker
call('ZADD', base .. 'workers', now + order.limits.worker_ttl_seconds, worker)
call('HSET', base .. 'addresses', worker, order.address)
call('HSET', base .. 'descriptions', worker, order.description)

local keys = {}
for i, copy in ipairs(order.copies) do
  keys[i] = copy[1]
end
local known, entries = read('held:' .. worker, keys), read('entries', keys)

local function note_tier(key, tier)
  -- Most copies are the only ones, and where they were.
  local alone = ' ' .. cjson.encode({ [worker] = tier })
  if string.sub(entries[key], -#alone) == alone then
    return
  end
  local holders = holders_of(entries[key])
  if holders[worker] ~= tier then
    holders[worker] = tier
    set_holders(key, entries[key], holders)
  end
end

local listed, drop_keys, unknown_keys = {}, {}, {}
for _, copy in ipairs(order.copies) do
  local key, tier = copy[1], copy[2]
  if known[key] then
    note_tier(key, tier)
  elseif not listed[key] then
    local marked = call('HEXISTS', base .. 'marked:' .. worker, key) == 1
    append(marked and drop_keys or unknown_keys, key)
  end
  listed[key] = true
end

local settled = now - order.limits.settle_seconds
local held = call('HGETALL', base .. 'held:' .. worker)
for i = 1, #held, 2 do
  if not listed[held[i]] and tonumber(held[i + 1]) <= settled then
    remove_copy(held[i], worker)
  end
end
local marked = call('HGETALL', base .. 'marked:' .. worker)
for i = 1, #marked, 2 do
  if not listed[marked[i]] and tonumber(marked[i + 1]) <= settled then
    call('HDEL', base .. 'marked:' .. worker, marked[i])
  end
end
return { drop_keys, unknown_keys }
