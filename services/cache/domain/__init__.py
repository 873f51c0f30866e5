"""Pure rules of the cache service: entries, leases, tickets, keys, receipts, eviction."""
