"""Every family that the worker loads, as tiny public models: one module a family, all of them in every test of exactness."""
