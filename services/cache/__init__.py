"""The cache service: the directory of segment states and prefix snapshots, their leases and tickets."""
