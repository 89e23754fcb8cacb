"""Settings of earlier releases. They stop no start, because an upgrade must need no edit: each has no effect, and is named."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

REMOVED: Final = {
    "adapter_page_error": "0.05",
    "admission_heartbeat_s": "10",
    "admission_lease_s": "45",
    "chunked_prefill": "true",
    "database_grace_s": "known_caller_s",
    "engine_hang_timeout_s": "120",
    "engine_start_silence_s": "60",
    "engine_step_warning_s": "10",
    "engine_unresponsive_s": "30",
    "grammar_deadline_s": "5",
    "grammar_memory_bytes": "1073741824",
    "idempotency_hours": "24",
    "kv_block_size": "16",
    "max_body_bytes": "10485760",
    "max_buffered_body_bytes": "268435456",
    "max_buffered_tokens": "8192",
    "max_connections_per_address": "1024",
    "max_lora_rank": "256",
    "max_open_uploads": "16",
    "max_uploads_in_flight": "32",
    "overlap": "auto",
    "phases_retention_days": "14",
    "quota_event_retention_days": "400",
    "reader_stall_s": "60",
    "ready_stall_s": "20",
    "upload_body_s": "3600",
    "upload_expiry_s": "86400",
    "upload_part_bytes": "16777216",
    "upload_stall_s": "30",
}
"""Each with what holds now, in place of any value."""


def without_effect(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each removed setting in `given` whose value is not what holds now."""
    for name, held in REMOVED.items():
        value = given.get(name)
        if value is not None and not _are_equal(str(value), held):
            yield f"setting `{name}` is gone: {value} has no effect, {held} holds; remove it"


def _are_equal(value: str, held: str) -> bool:
    try:
        return float(value) == float(held)
    except ValueError:
        return value.lower() == held
