"""CPU bodies compiled by numba to vector code, run on torch's own OpenMP threads.

Why not torch alone: at 1-16 rows a step of small operations costs more than the base GEMMs (README, Decisions).
"""
