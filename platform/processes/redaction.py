"""Takes secrets out of log lines. What a line should never get is not in it in the first place: this is the second line of defence.

Invariant: nothing that looks like a credential leaves the process in a log, whichever library wrote the line.
"""

import re
from typing import Final

from structlog.typing import EventDict, WrappedLogger

REDACTED: Final = "[redacted]"
SENSITIVE: Final = frozenset(
    (
        *("api_key", "authorization", "cookie", "password", "secret", "token", "totp", "key"),
        *("messages", "prompt", "content", "body", "arguments", "schema", "tools", "completion", "text"),
    )
)
"""Names of fields that would have a credential or content."""
_PATTERNS: Final = (
    # A pattern is searched only in lines that have its first part, in lower case: most have none of them.
    # No pattern begins at a word boundary: on a terminal a colour, which ends with a letter, may stand before it.
    # API keys keep their public id, webhook secrets nothing.
    (
        "lpx_",
        re.compile(r"(lpx_(?:live|test|op)_[0-9A-Za-z]{1,16})_[0-9A-Za-z]+(?:_[0-9A-Za-z]+)?"),
        rf"\1_{REDACTED}",
    ),
    ("whsec_", re.compile(r"whsec_[0-9A-Za-z+/=_-]+"), f"whsec_{REDACTED}"),
    (
        "bearer",
        re.compile(r"(bearer)\s+[0-9A-Za-z._~+/=-]{8,}", re.IGNORECASE),
        rf"\1 {REDACTED}",
    ),
    ("://", re.compile(r"(\w://)[^\s/@]+@"), rf"\1{REDACTED}@"),
    (
        "loraplex",
        re.compile(r"((?:__Host-)?loraplex(?:-operator)?)=[0-9A-Za-z._~+/=-]{8,}"),
        rf"\1={REDACTED}",
    ),
    (
        "=",
        re.compile(
            r"([?&](?:access_token|client_secret|code|id_token|password|secret|state|token)=)[^&\s\"'\\]+"
        ),
        rf"\1{REDACTED}",
    ),
)


def redact(line: str) -> str:
    """Replace every credential in a rendered line."""
    lowered = line.lower()
    for part, pattern, replacement in _PATTERNS:
        if part in lowered:
            line = pattern.sub(replacement, line)
    return line


def drop_sensitive_fields(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """A structlog processor: hides the values of fields that would have a credential or content."""
    for field in event.keys() & SENSITIVE:
        event[field] = REDACTED
    return event
