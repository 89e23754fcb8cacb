"""`demo.json` in the data directory: address and keys of the demo server.

Invariant: its mode is always 0600, and it is replaced in one step.
"""

import os
from pathlib import Path

import msgspec

from loraplex.adapters.storage.durable_files import write_private

DEMO_FILE = "demo.json"


class DemoTenantAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`api_key` has scope `inference`, `admin_key` scope `tenant:admin`."""

    name: str
    api_key: str
    admin_key: str
    adapters: tuple[str, ...]


class DemoAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`base_url` is the server's root, without `/v1`; `model` the served name of the base model."""

    base_url: str
    console_url: str | None
    model: str
    operator_key: str
    tenants: tuple[DemoTenantAccess, ...]


def read_demo_file(data_dir: Path) -> DemoAccess | None:
    """Read the file of the last start. None if it is lost or unreadable; then its keys must be replaced."""
    try:
        return msgspec.json.decode((data_dir / DEMO_FILE).read_bytes(), type=DemoAccess)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_demo_file(data_dir: Path, access: DemoAccess) -> Path:
    """Replace `demo.json` in one step."""
    path = data_dir / DEMO_FILE
    draft = path.with_name(f".{DEMO_FILE}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    write_private(draft, msgspec.json.format(msgspec.json.encode(access), indent=2) + b"\n")
    draft.replace(path)
    return path
