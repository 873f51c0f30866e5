"""How fast the router is by itself: `python -m bench.router`."""
