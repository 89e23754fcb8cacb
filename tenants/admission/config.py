"""Times and bounds of admission control."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Times in seconds. After `lease_s` without a heartbeat, a gateway counts as dead and its open requests are given up.

    An admission waits until Valkey has been silent for `valkey_s`, at a second attempt for 0.8 times that, or longer for a limit
    per day or month, and `journal_s` for the disk of its journal. When more than `max_pending_updates` ended requests wait for Valkey, their tenants' counters are
    rebuilt instead. Every `reconcile_s` the counters of at most `reconciled_at_once` tenants are compared with the ledger. Fences
    are read every `fence_poll_s`; a fence that a gateway does not confirm within `fence_s` is given up. What running requests have
    used is journaled every `progress_s`. Failed and refused requests, and their sums, are written every `refusal_counts_s`.
    """

    lease_s: float = 45.0
    heartbeat_s: float = 10.0
    gateway_live_s: float = 30.0
    valkey_s: float = 0.05
    journal_s: float = 5.0
    probe_s: float = 0.5
    retry_s: float = 1.0
    max_pending_updates: int = 10_000
    fence_poll_s: float = 0.25
    fence_s: float = 5.0
    progress_s: float = 0.5
    reconcile_s: float = 5.0
    reconciled_at_once: int = 32
    refusal_counts_s: float = 5.0
