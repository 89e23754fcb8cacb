"""The `model` field of a request, read as a reference to an adapter: `<adapter>`, `<adapter>:<alias>`,
`<adapter>@<version>`. Invariant: names hold neither `:` nor `@`, so a reference reads one way only.
"""

import re
from dataclasses import dataclass

from loraplex.tenants.names import ADAPTER_NAME, ALIAS_NAME

PRODUCTION = "production"
REFERENCE = re.compile(rf"({ADAPTER_NAME.strip('^$')})(?::({ALIAS_NAME.strip('^$')})|@([1-9][0-9]{{0,8}}))?")


@dataclass(frozen=True)
class ModelReference:
    """Exactly one of `alias` and `version` is set."""

    name: str
    alias: str | None
    version: int | None


def parse_model_reference(model: str) -> ModelReference | None:
    """None when `model` cannot name an adapter."""
    match = REFERENCE.fullmatch(model)
    if match is None:
        return None
    name, alias, version = match.groups()
    if version is not None:
        return ModelReference(name, None, int(version))
    return ModelReference(name, alias or PRODUCTION, None)
