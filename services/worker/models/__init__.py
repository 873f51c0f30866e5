"""Checkpoints to models: a family maps a config to layers, and tensor names to weights."""
