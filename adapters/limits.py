"""Limits on one uploaded adapter. Sizes in bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """A model of 126 layers with all seven projections has 1,768 tensors, whose header takes about 300 KiB."""

    max_config_bytes: int = 64 << 10
    max_config_depth: int = 8
    max_header_bytes: int = 1 << 20
    max_tensors: int = 8192
    max_weights_bytes: int = 4 << 30
    max_rank: int = 256


DEFAULT_LIMITS = AdapterLimits()
