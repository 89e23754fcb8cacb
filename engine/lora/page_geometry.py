"""Bounds and sizes of adapters' pages and tables, which the kernels and the memory plan share. Imports no torch."""

MAX_RANK = 256
PAGE_RANKS = 16
"""Rank rows of a page: the smallest K of a bf16 product on a tensor core, and a multiple of 16 bytes at every width."""
ALIGNMENT = 16
"""Alignment in bytes of every page: the widest load of a GPU."""
MIN_SCALE_BYTES = 64
"""The smallest page of scales."""
SPLIT_K = 1024
"""Inputs per shrink program: 32 KiB of A at rank 16, about 1 us at one SM's share of the bandwidth. Independent of the
batch."""
MAX_ADAPTER_SLOTS = 1024
