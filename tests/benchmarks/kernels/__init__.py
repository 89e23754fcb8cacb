"""Kernels as problems of stated shapes: what `bench attention`, `bench gemm`, `bench lora --kernels` and the GPU's runner measure."""
