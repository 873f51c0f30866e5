"""A vLLM connector that begins replies from decode states which HYPIC composed.

`connector` is what vLLM loads, and the only module beside `facts` that imports it; the others are free of vLLM.
"""
