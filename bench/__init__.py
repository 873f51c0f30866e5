"""Benchmarks: ratios measured side by side in one run, written as JSON, rendered into the docs."""
