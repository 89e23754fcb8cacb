"""How many keys and adapters a tenant may have where its operator has set no number. Invariant: there is one, since all that
has limits of its own is read, listed and kept in memory.
"""

DEFAULT_MAX_KEYS = 10_000
DEFAULT_MAX_ADAPTERS = 10_000


def key_limit(own: int | None) -> int:
    """`own`: what the operator has set."""
    return DEFAULT_MAX_KEYS if own is None else own


def adapter_limit(own: int | None) -> int:
    """`own`: what the operator has set."""
    return DEFAULT_MAX_ADAPTERS if own is None else own
