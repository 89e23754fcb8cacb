"""Labels of sessions: what the ledger, the limits and the console call the sessions that clients name.

Invariant: a label says nothing of the client's text without the server secret, and those of two tenants cannot be compared.
"""

import re
from collections.abc import Callable
from typing import Final
from uuid import UUID

DOMAIN: Final = b"loraplex/session/v1"
PREFIX: Final = "ses_"
DIGITS: Final = 32
LABEL: Final = re.compile(rf"{PREFIX}[0-9a-f]{{{DIGITS}}}")


def session_label(derive_key: Callable[..., bytes], tenant_id: UUID, text: str) -> str:
    """Return the label of a session that a client named by this text of any length: 36 ASCII characters, the same as long as
    the server secret is. `derive_key`: as `GatewayDependencies` has it.
    """
    named = text.encode(errors="surrogatepass")
    return PREFIX + derive_key(DOMAIN, tenant_id.bytes, named).hex()[:DIGITS]


def chosen_session(derive_key: Callable[..., bytes], tenant_id: UUID, text: str) -> str:
    """Return the label that a filter means: the text itself if it is one, else that of the client's own text."""
    return text if LABEL.fullmatch(text) else session_label(derive_key, tenant_id, text)
