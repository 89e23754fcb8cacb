"""Kernels as problems of stated shapes, for the kernel commands of `python -m tests.benchmarks` and for `tests.benchmarks.gpu`."""
