-- Answers {number of entries, number of documents, copies}.
return remove_scope(order.scope, next_sequence())
