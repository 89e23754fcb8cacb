"""The header by which a client limits the time of its request. Invariant: it only shortens what the server allows."""

import math
import time
from collections.abc import Mapping
from typing import Any, Final

from loraplex.platform.errors import InvalidParameter

TIMEOUT_HEADER: Final = "x-request-timeout-seconds"
_MEANING: Final = (
    "Seconds from the arrival of the request after which it ends with 504, in the queue as in the batch. "
    "Without effect where the server's own limit is shorter."
)
TIMEOUT_PARAMETER: Final[dict[str, Any]] = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": _MEANING,
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
"""The header in the OpenAPI document of an operation."""


def deadline_of(headers: Mapping[str, str]) -> float | None:
    """When the client gives up the request that arrives now, in the time of `time.monotonic`; None without the header.

    Raises `InvalidParameter` for anything but a positive, finite number.
    """
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidParameter(
            f"The header `{TIMEOUT_HEADER}` must be a number of seconds above 0.", param=TIMEOUT_HEADER
        )
    return time.monotonic() + seconds
