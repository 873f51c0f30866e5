"""The operations that mixers are made of: one folder an op, `naive` (the readable truth) beside `chunked` (the CPU form).

Letters, as in the field: N packed tokens, R runs, P parts, B requests, H heads, K key channels, V value channels,
C convolution channels. Tokens of several runs are packed along one axis; `cu_*` lists hold their offsets.
"""
