return remove_scope(order.scope, next_sequence())
