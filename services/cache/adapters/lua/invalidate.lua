-- Answers {number of entries, number of documents, copies}.
call('SREM', base .. 'pinned', order.scope)
local removed = remove_scope(order.scope, next_sequence())
trim_past()
return removed
