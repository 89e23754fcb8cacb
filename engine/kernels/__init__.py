"""The operations that layers call. Each file has one operation and chooses its backend.

Backends with one signature: `reference/` (torch: the specification), `cpu/` (numba) and `triton/` (CUDA).
"""
