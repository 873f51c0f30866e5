"""The `hypic` command."""
