"""Endpoints of the OpenAI and Anthropic APIs that are not offered, and what to use instead."""

from collections.abc import Mapping
from typing import Final

INSTEAD: Final[Mapping[str, str]] = {
    "use POST /v1/chat/completions": "/v1/assistants /v1/threads /v1/batches",
    "nothing is stored: send the conversation with POST /v1/responses": "/v1/conversations",
    "use POST /v1/completions": "/v1/complete",
    "train elsewhere, and upload with POST /tenant/v1/adapters/{name}/versions": "/v1/fine_tuning",
    "use another server for this: this one only generates text": (
        "/v1/embeddings /v1/moderations /v1/images /v1/audio /v1/rerank /v1/realtime"
    ),
    "let the base URL of a client of Anthropic end without /v1": "/v1/v1/messages",
    "let the client's base URL end with /v1, once": "/chat/completions /completions /models /v1/v1",
}
"""Text -> paths, each of which stands for those below it too. The first one that fits counts."""

_BY_PATH: Final = [(f"{path}/", text) for text, paths in INSTEAD.items() for path in paths.split()]


def instead_of(path: str) -> str | None:
    """Return what to use instead of a path that does not exist; None where there is nothing to say."""
    return next((text for begin, text in _BY_PATH if f"{path}/".startswith(begin)), None)
