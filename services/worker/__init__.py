"""The worker: capture, combine and decode of one model on one device."""
