"""The engine on one GPU at a true shape, weights drawn from a seed: `python -m bench.gpu SUBJECT --out FILE`."""
