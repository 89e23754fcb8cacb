"""Times and bounds of admission control."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Times in seconds. After `lease_s` without a heartbeat, a gateway counts as dead and its open requests are given up.

    An admission waits `valkey_s` for Valkey, and 0.8 times that for a second attempt. When `max_pending_settlements`
    settlements wait for PostgreSQL, nothing more is admitted. Every `reconcile_s` the counters of at most
    `reconciled_at_once` tenants are compared with the ledger. Counts of refused requests are written every
    `refusal_counts_s`.
    """

    lease_s: float = 45.0
    heartbeat_s: float = 10.0
    gateway_live_s: float = 30.0
    valkey_s: float = 0.05
    probe_s: float = 0.5
    retry_s: float = 1.0
    max_pending_settlements: int = 10_000
    reconcile_s: float = 5.0
    reconciled_at_once: int = 32
    refusal_counts_s: float = 5.0
