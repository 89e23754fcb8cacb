"""The operations layers may call. Each file holds one operation and the one-line choice of its body.

Bodies with one signature: `reference/` (torch: the specification), `cpu/` (by numba) and `triton/` (for CUDA).
"""
