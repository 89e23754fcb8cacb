"""Replays decode steps as CUDA graphs: static buffers, buckets of rows, one capture per bucket and kind of adapters."""
