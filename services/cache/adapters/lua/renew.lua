-- 1, or 0 when the lease is unknown.
local lease_ends = expiry('leases', order.lease)
if lease_ends == 0 then
  return 0
end
lease_ends = math.max(lease_ends, now + order.lease_seconds)
call('ZADD', base .. 'leases', lease_ends, order.lease)
for _, ticket in ipairs(call('SMEMBERS', base .. 'lease_tickets:' .. order.lease)) do
  call('ZADD', base .. 'tickets', math.max(expiry('tickets', ticket), lease_ends), ticket)
end
return 1
