"""How work is shared among workers: scheduling against exhaustion, and first tokens on virtual workers with measured costs."""
