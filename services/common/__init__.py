"""What every service shares: settings, errors, logs, request ids, gRPC plumbing. Nothing of one service's domain."""
