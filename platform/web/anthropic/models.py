"""The shape of `/v1/models` for clients of Anthropic, which send `anthropic-version`."""

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.requests import Request

from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.observability.request_id import response_headers_of
from loraplex.platform.web.anthropic.errors import client_headers, is_anthropic
from loraplex.platform.web.anthropic.response_models import ModelInfo, ModelPage
from loraplex.platform.web.inference_plane import InferencePlane


def asks_for_model_info(request: Request) -> bool:
    """Return whether the client is one of Anthropic, whose headers its response then has."""
    if not is_anthropic(request):
        return False
    headers = response_headers_of(request.scope)
    headers.update(client_headers(request.headers, headers))
    return True


def model_info(plane: InferencePlane, model: ResolvedModel) -> ModelInfo:
    """Return one model."""
    return ModelInfo(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(plane.started if model.created is None else model.created, UTC),
        max_input_tokens=plane.pipeline.encoder.context_tokens,
        max_tokens=plane.pipeline.encoder.context_tokens,
    )


def model_page(models: Sequence[ModelInfo]) -> ModelPage:
    """Return all models as the one page."""
    return ModelPage(data=[*models], has_more=False, first_id=models[0].id, last_id=models[-1].id)
