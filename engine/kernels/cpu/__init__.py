"""The CPU backend: kernels compiled by numba to vector code, run on torch's own OpenMP threads.

torch alone is too slow: at 1-16 rows a step of small operations costs more than the base GEMMs (README, decision 1).
"""
