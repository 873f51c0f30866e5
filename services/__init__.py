"""The services of the tier: router, cache, worker, and what they share."""
