-- Answers {number of entries, number of documents, copies}.
call('SREM', base .. 'pinned', order.scope)
return remove_scope(order.scope, next_sequence())
