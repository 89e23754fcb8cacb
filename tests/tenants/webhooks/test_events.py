"""What the README promises to receivers is what the code has."""

import re
from pathlib import Path

import msgspec

from loraplex.tenants.retention import WEBHOOK_EVENTS
from loraplex.tenants.webhooks.deliveries import LEASE, MAX_AGE
from loraplex.tenants.webhooks.events import DATA_TYPES
from loraplex.tenants.webhooks.receiver_urls import MAX_URL_LENGTH, MIN_PORT
from loraplex.tenants.webhooks.records import EVENT_TYPES, MAX_ATTEMPTS, MAX_WEBHOOKS

README = Path(__file__).parents[3] / "tenants" / "webhooks" / "README.md"


def test_every_type_is_documented_with_its_fields() -> None:
    assert set(DATA_TYPES) == set(EVENT_TYPES)
    documented: dict[str, tuple[str, ...]] = {}
    table = README.read_text().partition("| Type | `data` |")[2].partition("\n\n")[0]
    for types, fields in re.findall(r"^\| (`[a-z]+\.[a-z`., ]+) \| (.*) \|$", table, re.MULTILINE):
        plain = re.sub(r" \([^)]*\)", "", fields)
        documented |= {
            kind: tuple(re.findall(r"`(\w+)`", plain)) for kind in re.findall(r"`([\w.]+)`", types)
        }
    assert documented == {
        kind: tuple(field.name for field in msgspec.structs.fields(data)) for kind, data in DATA_TYPES.items()
    }


def test_every_limit_is_documented_with_its_number() -> None:
    text = README.read_text()
    for phrase in (
        f"| endpoints of a tenant | {MAX_WEBHOOKS} |",
        f"| URL | {MAX_URL_LENGTH:,} characters; `https`; port 443 or {MIN_PORT} to 65535 |",
        f"| attempts | {MAX_ATTEMPTS}, after",
        f"dead after {MAX_AGE.days} days",
        f"for {WEBHOOK_EVENTS.days} days",
        f"ends after {LEASE.seconds} s",
    ):
        assert phrase in text, phrase
