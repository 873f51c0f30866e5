if expiry('leases', order.lease) ~= 0 then
  for _, ticket in ipairs(call('SMEMBERS', base .. 'lease_tickets:' .. order.lease)) do
    end_ticket(ticket)
  end
  end_lease(order.lease)
end
return 1
