-- What is remembered of evictions, for scripts that evict, publish or plan; memory_evictions.py has the same steps. It follows
-- prelude.lua.
local function forget_ghost(key)
  local size = call('HGET', base .. 'ghost_sizes', key)
  if size then
    call('ZREM', base .. 'ghosts', key)
    call('HDEL', base .. 'ghost_sizes', key)
    call('DECRBY', base .. 'ghost_bytes', size)
  end
  call('ZREM', base .. 'own_ghosts', key)
end

-- An entry with these bytes in all copies leaves, for its tenant's own budget or for the whole one.
local function note_ghost(key, size, is_own)
  local number = call('INCR', base .. 'evicted')
  if is_own then
    call('ZADD', base .. 'own_ghosts', number, key)
    call('ZREMRANGEBYRANK', base .. 'own_ghosts', 0, -order.limits.max_ghosts - 1)
    return
  end
  call('ZADD', base .. 'ghosts', number, key)
  call('HSET', base .. 'ghost_sizes', key, integer(size))
  call('INCRBY', base .. 'ghost_bytes', integer(size))
  if call('ZCARD', base .. 'ghosts') > order.limits.max_ghosts then
    forget_ghost(call('ZRANGE', base .. 'ghosts', 0, 0)[1])
  end
end

-- An entry of one tenant made room for another's.
local function note_pair(evictor, victim, size, tokens)
  local pair = evictor .. ' ' .. victim
  if call('ZSCORE', base .. 'evictors', pair) == false then
    local rank = 0
    if call('ZCARD', base .. 'evictors') >= order.limits.max_eviction_pairs then
      local lowest = call('ZPOPMIN', base .. 'evictors')
      call('HDEL', base .. 'evictions', lowest[1])
      rank = lowest[2]
    end
    call('ZADD', base .. 'evictors', rank, pair)
  end
  call('ZINCRBY', base .. 'evictors', 1, pair)
  local entries, bytes, seen_tokens = string.match(call('HGET', base .. 'evictions', pair) or '0 0 0', '(%S+) (%S+) (%S+)')
  local counts = { integer(entries + 1), integer(bytes + size), integer(seen_tokens + tokens) }
  call('HSET', base .. 'evictions', pair, table.concat(counts, ' '))
end

-- Why an absent key is absent: {cause, missing bytes}.
local function miss_of(key)
  local number = call('ZSCORE', base .. 'ghosts', key)
  if number then
    local later = call('ZCOUNT', base .. 'ghosts', number, '+inf')
    local bytes = later * tonumber(call('GET', base .. 'ghost_bytes')) / call('ZCARD', base .. 'ghosts')
    return { 'room', integer(math.floor(bytes)) }
  end
  return { call('ZSCORE', base .. 'own_ghosts', key) and 'tenant_budget' or 'new', '0' }
end
