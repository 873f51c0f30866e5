"""Checkpoints described before they are loaded: what a family would read, what it would keep, and what fits a GPU."""
