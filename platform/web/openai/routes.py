"""The routes of `/v1`. Every route asks for the scope `inference`; bodies go through the closed parameter table."""

from typing import Final

from fastapi import APIRouter
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode

from loraplex.platform.parameters.parameter_table import MODELS
from loraplex.platform.web.inference_plane import generating
from loraplex.platform.web.openai import chat_completions, completions, decisions, models, tokenize
from loraplex.platform.web.openai.response_models import ChatCompletionChunk
from loraplex.platform.web.openai.responses import routes as responses
from loraplex.platform.web.openai.responses.models import ResponseEvent
from loraplex.platform.web.transport.direct_routes import DirectRoute

PREFIX: Final = "/v1"

router = APIRouter(prefix=PREFIX, tags=["inference"])
router.include_router(chat_completions.router)
router.include_router(completions.router)
router.include_router(responses.router)
router.include_router(decisions.router)
router.include_router(models.router)
router.include_router(tokenize.router)

DIRECT: Final = {
    f"{PREFIX}/chat/completions": DirectRoute(
        chat_completions.chat_completions, generating(chat_completions.RECORDED)
    ),
    f"{PREFIX}/completions": DirectRoute(completions.completions, generating(completions.DIALECT)),
    f"{PREFIX}/responses": DirectRoute(responses.responses, generating(responses.DIALECT)),
}
"""The routes that generate, by their paths."""
DOCUMENTED_MODELS: Final[tuple[tuple[type[BaseModel], JsonSchemaMode], ...]] = (
    *((model, "validation") for model in MODELS.values()),
    (ChatCompletionChunk, "serialization"),
    (ResponseEvent, "serialization"),
)
"""Models that FastAPI does not find in a route's declaration."""
