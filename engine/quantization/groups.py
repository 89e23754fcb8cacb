"""The groups of inputs that may share a scale, and the size of a quantized weight in memory. Free of torch."""

GROUP_SIZES = (128, 64, 32)
"""Group sizes of a scale; int8 also allows one scale for all inputs of an output."""
_LONGEST_SPAN = 128
"""Inputs of a tile of int4: 64 bytes of an output, one memory transaction."""


def span_of(group_size: int) -> int:
    """Return the inputs of one tile of int4: whole groups in either half."""
    return min(_LONGEST_SPAN, 2 * group_size)


def largest_group(inputs: int) -> int:
    """Return the largest group that divides the inputs, else the smallest group."""
    return next((size for size in GROUP_SIZES if inputs % size == 0), GROUP_SIZES[-1])
