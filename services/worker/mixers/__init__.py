"""Token mixers, one module a family. Each runs in three passes: capture, combine, decode."""
