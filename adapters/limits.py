"""Limits on one uploaded adapter, and on uploads. Sizes in bytes, times in seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """A model of 126 layers with all seven projections has 1,768 tensors, whose header takes about 300 KiB.

    A configuration that gives each of its modules an alpha and a rank of its own takes about 110 KiB.
    """

    max_config_bytes: int = 256 << 10
    max_config_depth: int = 8
    max_header_bytes: int = 1 << 20
    max_tensors: int = 8192
    max_weights_bytes: int = 4 << 30
    max_rank: int = 256


DEFAULT_LIMITS = AdapterLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadConfig:
    """Uploads: `max_open` per tenant; `max_in_flight` bodies at once per gateway, `max_in_flight_per_tenant` of one
    tenant. No upload writes to a file system with less than `storage_floor_bytes` free; 0 is no floor.

    A body is refused if it stalls for `stall_s`, takes longer than `body_s`, or is slower than `min_bytes_per_s` on
    average after `grace_s`. Parts are assembled within `completion_s`. A request that works on an upload leases it
    for `lease_s` and renews the lease; after a crash the upload is free again when the lease ends.
    """

    part_bytes: int = 16 << 20
    expiry_s: float = 86_400.0
    max_open: int = 16
    max_in_flight: int = 32
    max_in_flight_per_tenant: int = 8
    stall_s: float = 30.0
    body_s: float = 3600.0
    grace_s: float = 30.0
    min_bytes_per_s: int = 4096
    completion_s: float = 900.0
    lease_s: float = 60.0
    storage_floor_bytes: int = 0
