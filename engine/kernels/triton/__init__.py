"""The CUDA backend: Triton kernels, one operation per module."""
