for _, lease in ipairs(order.leases) do
  if expiry('leases', lease) ~= 0 then
    for _, ticket in ipairs(call('SMEMBERS', base .. 'lease_tickets:' .. lease)) do
      end_ticket(ticket)
    end
    end_lease(lease)
  end
end
return 1
