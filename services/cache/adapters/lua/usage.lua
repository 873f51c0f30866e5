return {
  call('ZCARD', base .. 'born'), used_bytes(), call('ZCARD', base .. 'leases'), call('HLEN', base .. 'ticket_of'),
  call('ZCARD', base .. 'workers'),
}
