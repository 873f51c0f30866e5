"""Open-loop load against a running stack: which rate keeps a promise on the first token, with which kind of reuse."""
