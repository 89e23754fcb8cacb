"""What a gateway takes from its settings reaches what requests are bounded by."""

from dataclasses import fields
from typing import Any

from loraplex.platform.config import Settings
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.server.gateway import serving_config

GIVEN: dict[str, Any] = {
    "max_requests_in_flight": 7,
    "grammar_fast_forward": False,
    "queue_timeout_s": 1.0,
    "first_token_timeout_s": 2.0,
    "total_timeout_s": 3.0,
    "allowed_origins": ("https://app.example.com",),
    "known_caller_s": 4.0,
    "webhook_allow_private": True,
    "audit_retention_days": 5,
    "accelerator_price_per_hour": 6,
}


def test_every_setting_of_requests_reaches_them() -> None:
    found, usual = serving_config(Settings(**GIVEN)), ServingConfig()
    assert (found.max_in_flight, found.fast_forward, found.audit_retention_days) == (7, False, 5)
    assert (found.queue_timeout_s, found.first_token_timeout_s, found.total_timeout_s) == (1.0, 2.0, 3.0)
    assert (found.allowed_origins, found.known_caller_s) == (("https://app.example.com",), 4.0)
    assert found.webhook_allow_private and found.accelerator_price is not None
    changed = [each.name for each in fields(found) if getattr(found, each.name) != getattr(usual, each.name)]
    assert len(changed) == len(GIVEN)
