return {
  call('ZCARD', base .. 'born'), tonumber(call('GET', base .. 'bytes') or '0'), call('ZCARD', base .. 'leases'), call('HLEN', base .. 'ticket_of'),
  call('ZCARD', base .. 'workers'),
}
