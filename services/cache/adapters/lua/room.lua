-- How room is made, for scripts that need some; it follows storing.lua and goes before theirs.
local function share_of_each()
  return order.limits.budget_bytes / math.max(call('ZCARD', base .. 'shares'), 1)
end

-- A tenant's candidates while some are taken away.
local function open_queue(tenant, left)
  local queue = { tenant = tenant, left = left, place = -1 }
  queue.has_share = call('ZSCORE', base .. 'shares', tenant) and true or false
  return queue
end

local function advance(queue, spared)
  local head
  repeat
    queue.place = queue.place + 1
    head = call('ZRANGE', base .. 'idle:' .. queue.tenant, queue.place, queue.place, 'WITHSCORES')
  until head[1] ~= spared
  queue.key, queue.score = head[1], tonumber(head[2])
  queue.bytes = head[1] and held_bytes(entry_of(head[1]))
end

local function comes_first(queue, other)
  return not other or queue.score < other.score or (queue.score == other.score and queue.key < other.key)
end

-- choose_victims of domain/eviction.py: what to evict, a list of {key, score}, before `size` bytes of a tenant fit, first
-- for its own budget (`num_own` of them, where that is less than the whole one); nil when they cannot.
local function victims(tenant, size, spared)
  local own_need = bytes_of(tenant) + size - budget_of(tenant)
  local any_need = used_bytes() + size - order.limits.budget_bytes
  local found, freed, is_bounded = { num_own = 0 }, 0, budget_of(tenant) < order.limits.budget_bytes
  if own_need <= 0 and any_need <= 0 then
    return found
  end
  local share, queues, own = share_of_each(), {}, nil

  local function take(queue)
    found[#found + 1] = { queue.key, queue.score }
    freed = freed + queue.bytes
    queue.left = queue.left - queue.bytes
    advance(queue, spared)
  end

  local function can_give(queue)
    return queue.key and (queue == own or not queue.has_share or queue.left - queue.bytes >= share)
  end

  local held = call('HGETALL', base .. 'bytes_of')
  for i = 1, #held, 2 do
    local queue = open_queue(held[i], tonumber(held[i + 1]))
    advance(queue, spared)
    queues[#queues + 1] = queue
    own = queue.tenant == tenant and queue or own
  end
  while freed < own_need do
    if not own or not own.key then
      return nil
    end
    take(own)
    found.num_own = found.num_own + (is_bounded and 1 or 0)
  end
  while freed < any_need do
    local lowest
    for _, queue in ipairs(queues) do
      if can_give(queue) and comes_first(queue, lowest) then
        lowest = queue
      end
    end
    if not lowest then
      return nil
    end
    take(lowest)
  end
  return found
end

-- Remove entries for room, which a tenant needs where one is given; the keys of those that this worker held.
local function evict(found, worker, evictor)
  local drop_keys = {}
  for i, victim in ipairs(found) do
    local entry = entry_of(victim[1])
    local size = held_bytes(entry)
    if evictor then
      note_pair(evictor, part(entry, 'tenant'), size, part(entry, 'tokens'))
    end
    note_ghost(victim[1], size, evictor and i <= found.num_own)
    clock = math.max(clock, victim[2])
    if worker and holders_of(entry)[worker] then
      append(drop_keys, victim[1])
    end
    remove_entry(victim[1], entry, {})
  end
  if #found > 0 then
    call('SET', base .. 'clock', string.format('%.17g', clock))
  end
  return drop_keys
end
