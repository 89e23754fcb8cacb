"""The routes of the Messages API. Every route asks for the scope `inference`; bodies go through the closed parameter table."""

from typing import Final

from fastapi import APIRouter

from loraplex.platform.web.anthropic import count_tokens, messages
from loraplex.platform.web.inference_plane import generating
from loraplex.platform.web.transport.direct_routes import DirectRoute

PREFIX: Final = "/v1"

router = APIRouter(prefix=PREFIX, tags=["inference"])
router.include_router(messages.router)
router.include_router(count_tokens.router)

DIRECT: Final = {f"{PREFIX}/messages": DirectRoute(messages.messages, generating(messages.DIALECT))}
"""The route that generates, by its path."""
