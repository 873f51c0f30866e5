"""The cache service under load, and eviction policies on traces."""
