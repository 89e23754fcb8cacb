"""The groups of inputs that may share a scale, and what a quantized weight takes in memory. Free of torch."""

GROUP_SIZES = (128, 64, 32)
"""Inputs that may share a scale; int8 also knows one scale for all inputs of an output."""
_LONGEST_SPAN = 128
"""Inputs of a tile of int4: 64 bytes of an output, what the memory hands out at once."""


def span_of(group_size: int) -> int:
    """Inputs of one tile of int4: whole groups in either half."""
    return min(_LONGEST_SPAN, 2 * group_size)


def largest_group(inputs: int) -> int:
    """The largest group that divides the inputs, else the smallest there is."""
    return next((size for size in GROUP_SIZES if inputs % size == 0), GROUP_SIZES[-1])
