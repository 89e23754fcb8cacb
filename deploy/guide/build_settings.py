"""Writes `settings.md`, the page of all settings, from `Settings`. Run it after a change: `python -m deploy.guide.build_settings`.

Invariant: the page is a function of `platform/config.py`, the flags of `platform/cli/serve.py` and the notes here.
"""

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from loraplex.platform.cli.serve import serve_command
from loraplex.platform.config import Settings
from loraplex.platform.removed_settings import REMOVED

PAGE: Final = Path(__file__).parent / "settings.md"
LISTS: Final = {
    "allowed_origins": "origins",
    "engine": "`ipc://` addresses, or `ray://APP`",
    "oidc_allowed_domains": "domains",
    "tier_default_max_tokens": "`tier=tokens`",
    "trusted_proxies": "networks",
}
TEXTS: Final = {str: "text", Path: "path", SecretStr: "text, hidden"}
SIZES: Final = ((1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
UNPREFIXED: Final = ("database_url", "redis_url")
"""Settings that are read from variables without `LORAPLEX_`, too."""
HEAD: Final = """# Settings

<!-- `python -m deploy.guide.build_settings` writes this page: change `platform/config.py`, or the notes there. -->

A setting is an environment variable (`LORAPLEX_PORT=8001`) or a line of `loraplex.toml` (`port = 8001`). Some are flags of
`loraplex serve`, too. A flag wins over the variable, the variable over the file, and the file over the default.

A wrong value stops the start with the setting's name, the value and what is allowed. Times are in seconds, sizes in bytes.
"""
TABLE: Final = "| Setting | Variable, flag | Allowed | Default | Meaning |\n|---|---|---|---|---|\n"
NOTES: Final = {
    "demo": """## Model

- `dtype` auto: on a CPU bfloat16 instead of float16, and float32 where the CPU has no bfloat16 instructions. A CPU without
  float16 instructions takes `float16` only where all projections and the head are quantized.
- `kv_cache_dtype` fp8 rounds to 3 bits of mantissa.
""",
    "host": """## Addresses and console

- With `tls_certificate`, API, console and metrics are served by TLS 1.2 or newer. The files are read at the start, and again at
  SIGHUP.
- The console answers by the name of `public_url`, `localhost` and IP addresses alone. Without `public_url` it answers by any name if
  `host` is reachable from other machines. Forms from another origin are refused.
- `allowed_origins` names origins such as `https://app.example.com`. Requests never carry cookies, and no other plane is open to
  pages. The server warns of `*` at its start.
- A client address, or a /64 of IPv6, has at most 1,024 connections. `trusted_proxies` are exempt.
""",
    "smtp_url": """## Mail and sign-in

- The server mails links of resets and sign-ups by `smtp_url`. Without it, links are shown to those who make them.
- `oidc_issuer` is an `https` URL; on this machine it may be `http`. The client's redirect address is
  `<public address>/console/oidc/callback`.
""",
    "data_dir": """## Processes and stores

- An engine listens on one socket, such as `ipc:///run/engine.sock`; a gateway connects to one or more, or to all that match a
  pattern such as `ipc:///run/loraplex/engine/*.sock`, as they come and go. [Several engines](several-engines.md).
- `ray://APP`: the replicas of this Ray Serve application are the engines (extra `ray`, see [Ray](../ray/README.md)).
""",
    "blob_store": """## Storage of adapters

- With `s3`, `data_dir` has a copy of the adapters in use. Beyond `adapter_disk_bytes` the least recently used copies are removed, but
  none used within the last `total_timeout_s` and 5 minutes.
- An upload has parts of 16 MiB and expires after a day. A body takes at most an hour and pauses at most 30 s.
- A tenant has at most 16 open uploads. A gateway receives 32 bodies at once, 8 of one tenant: its further ones get 429. When it is
  full, they get 503.
""",
    "memory_utilization": """## Engine

- `adapter_bytes` by default: on a GPU a quarter of what weights and reserve leave, at least 512 MiB; on a CPU 512 MiB.
- `adapter_host_bytes` is reserved at the start. With 8-bit pages an adapter is rejected if one of its modules changes by more than
  5 % of its norm. Adapters have ranks up to 256.
- Beyond `max_waiting`, a tenant that has filled its share of the queue gets 429. The newest requests that are shed for another
  tenant get 503.
- `deterministic` holds whatever runs beside a request, however its prompt is cut, and with cached prefixes and preemptions. Responses
  are not published to the prefix cache, and float32 and GPUs are slower.
- A KV block has 16 tokens. On every device but the CPU, a step is prepared while the previous one computes.
""",
    "default_max_tokens": """## Requests

- `default_max_tokens` is of tenants whose own is null, and lowered to what fits.
- `unknown_parameters` is of tenants that have `default`. `refuse`: such a request is refused by name. `report`: it is served without
  the parameter, which `x-loraplex-ignored-parameters` names.
- A tenant has at most half of `max_requests_in_flight`, or one sequence: its further ones get 429. When it is full, the newest
  request of the largest tenant that has not started gets 503.
- `max_connections` are fewer where the limit of open files leaves less. With less than 64 the server does not start.
- A body has at most 10 MiB. All bodies of a gateway have 256 MiB until the engine has started their requests, those of a tenant alone
  a quarter of it.
- A client that reads nothing for 60 s, or leaves 8,192 tokens unread, loses its request and its connection.
- The check of a schema has 5 s and 1 GiB: beyond that the request gets 400.
""",
    "currency": """## Prices and records

- `currency` and the prices make an installation's first rate card, and have no effect once there is one. Later prices are rate cards.
  The demo has 100000, 50000 and 400000 where none is set.
- With `accelerator_price_per_hour` the operator sees cost and margin beside revenue.
- The journal is in the data directory. When it is full, new requests get 507.
- A key is deleted `audit_retention_days` after its end. Events about budgets stay 400 days, phases of requests 14 days,
  minutes of engines 7 days, and errors of failed and refused requests 1 day.
- Responses to an `Idempotency-Key` are stored 24 hours, encrypted.
- What `meter_export` sends: [usage](../../tenants/usage/README.md).
""",
    "drain_grace_s": """## Operating

- `drain_grace_s` lets a balancer that asks every 2 s leave first. SIGINT, as of a terminal, skips it.
- A restart of an engine may take five times as long as its first start, at least 60 s. A start that neither computes nor reads for
  60 s is ended, with the name of its stage.
- A step of more than 10 s is logged once, with what it computes and the stacks of all threads. An engine with work that completes
  no step makes `/readyz` fail after 20 s and is restarted after 120 s; one that answers no ping is restarted after 30 s.
- A gateway renews the leases of its running requests every 10 s. They count as running for 45 s after the last time.
- The second attempt of an admission waits 0.8 times `valkey_timeout_s`. It waits 0.9 s where a limit per day or month
  would refuse otherwise. After both, each gateway applies its share of the limits, and budgets refuse.
- `known_caller_s` counts from when this gateway read the key and its policy. `/readyz` fails when PostgreSQL was away as long, and for
  at least 30 s.
- `metrics_adapter_names`: the labels name running and waiting adapters as requests name them.
- `/v1/traces` is appended to `otlp_endpoint` (OTLP over HTTP).
""",
}
"""By the first setting of each section: its title, and what its settings do together."""
GONE: Final = """
## Settings of earlier releases

They have no effect and stop no start. A warning at the start names each whose value is not what holds now.

| Setting | Holds now |
|---|---|
"""


def page() -> str:
    """Return the page."""
    flags, meanings = inspect.signature(serve_command).parameters, dict(_meanings())
    text = HEAD
    for name, field in Settings.model_fields.items():
        if name in NOTES:
            text += f"\n{NOTES[name]}\n{TABLE}"
        sources = [name.upper()] * (name in UNPREFIXED) + [f"LORAPLEX_{name.upper()}"]
        sources += [f"--{name.replace('_', '-')}"] * (name in flags)
        named = ", ".join(f"`{source}`" for source in sources)
        default = _shown(name, field.default)
        text += f"| `{name}` | {named} | {_allowed(name, field)} | {default} | {meanings[name]} |\n"
    return text + GONE + "".join(f"| `{name}` | {held} |\n" for name, held in REMOVED.items())


def _meanings() -> Iterator[tuple[str, str]]:
    """Yield each setting with its docstring, which Python keeps in the source alone."""
    for described in ast.parse(inspect.getsource(Settings)).body:
        for setting, text in pairwise(getattr(described, "body", ())):
            match setting, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(meaning))
                ):
                    yield name, " ".join(meaning.split())


def _allowed(name: str, field: FieldInfo) -> str:
    """What a setting may be, from its type and bounds."""
    if name in LISTS:
        return LISTS[name]
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):
        return ", ".join(map(str, kinds))
    if kinds == [bool]:
        return "true, false"
    # Of an annotated type that may be None too, its first argument.
    kind = next(iter(get_args(kinds[0])), kinds[0])
    if kind in TEXTS:
        return TEXTS[kind]
    bounds = {bound: getattr(each, bound) for each in field.metadata for bound in _bounds(each)}
    low = f"above {_shown(name, bounds['gt'])}" if "gt" in bounds else _shown(name, bounds["ge"])
    return f"{low} to {_shown(name, bounds['le'])}"


def _bounds(constraint: object) -> list[str]:
    return [bound for bound in ("ge", "gt", "le") if hasattr(constraint, bound)]


def _shown(name: str, value: Any) -> str:
    if value in (None, (), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and value:
        return next(f"{value // unit} {label}" for unit, label in SIZES if value % unit == 0)
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
