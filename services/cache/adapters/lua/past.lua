-- What outlives entries, for scripts that change it; it follows prelude.lua and goes before theirs. memory_past.py has the
-- same steps.

-- Forget the oldest of the past where it is too much; behind every change.
local function trim_past()
  while call('ZCARD', base .. 'past') > order.limits.max_remembered do
    local oldest = call('ZPOPMIN', base .. 'past')
    local key, scope = string.match(oldest[1], '^(%x+)|(.*)$')
    if key then
      call('SREM', base .. 'links:' .. key, scope)
    else
      call('HDEL', base .. 'epochs', oldest[1])
    end
    call('SET', base .. 'floor', integer(tonumber(oldest[2])))
  end
end

local function is_forgettable(scope)
  return string.sub(scope, 1, 7) ~= 'tenant:' and string.sub(scope, 1, 6) ~= 'model:'
end

local function advance_epoch(scope, epoch)
  call('HSET', base .. 'epochs', scope, integer(epoch))
  if is_forgettable(scope) then
    call('ZADD', base .. 'past', epoch, scope)
  end
end

-- Forget a scope's invalidation, where something else tells its epoch from now on.
local function drop_epoch(scope)
  call('HDEL', base .. 'epochs', scope)
  call('ZREM', base .. 'past', scope)
end

-- Receipts of a published key do not say what it falls with since.
local function link_published(key, scope, entry)
  if call('SADD', base .. 'links:' .. key, scope) == 1 then
    call('ZADD', base .. 'past', next_sequence(), key .. '|' .. scope)
    trim_past()
  end
  if has_pins and part(entry, 'kind') == 'segment' and call('SISMEMBER', base .. 'pinned', scope) == 1 then
    set_busy(key, entry)
  end
end

-- Let a key fall with more scopes than `known`, what `scopes` says of it; what it is to say, once `tell_links` was called.
-- `entry`: false where the key is not published.
local links = { scopes = {}, keys_of = {} }
local function link(key, known, more, entry)
  local all = known
  for _, scope in ipairs(more) do
    if not string.find(' ' .. all .. ' ', ' ' .. scope .. ' ', 1, true) then
      all = all == '' and scope or all .. ' ' .. scope
      append(list_of(links.keys_of, scope), key)
      if entry then
        link_published(key, scope, entry)
      end
    end
  end
  if all ~= known then
    put(links.scopes, key, all)
  end
  return all
end

local function tell_links()
  tell('HSET', 'scopes', links.scopes)
  tell_each('SADD', 'scope:', links.keys_of)
  links = { scopes = {}, keys_of = {} }
end

