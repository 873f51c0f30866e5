return { integer(epoch_of(order.tenant)), integer(epoch_of(order.model)) }
