-- Answers, for each of the scopes, whether it is pinned: 1 or 0.
return call('SMISMEMBER', base .. 'pinned', unpack(order.scopes))
