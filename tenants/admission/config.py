"""Times and bounds of admission control."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Times in seconds. A gateway that is silent for `lease_s` is taken for dead and its open requests are given up.

    `valkey_s` is how long an admission waits for Valkey, and 0.8 times that once more for a second attempt; `most_pending`,
    how many settlements may wait for PostgreSQL before nothing more is admitted. Every `compare_s` the counters of
    `compared_at_once` tenants are compared with the books.
    """

    lease_s: float = 45.0
    heartbeat_s: float = 10.0
    gateway_live_s: float = 30.0
    valkey_s: float = 0.05
    probe_s: float = 0.5
    retry_s: float = 1.0
    most_pending: int = 10_000
    compare_s: float = 5.0
    compared_at_once: int = 32
