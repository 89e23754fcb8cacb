"""The shape of `/v1/models` for clients of Anthropic, which send `anthropic-version`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.observability.request_id import response_headers_of
from loraplex.platform.web.anthropic.errors import check_version, client_headers, is_anthropic
from loraplex.platform.web.anthropic.response_models import ModelInfo, ModelPage
from loraplex.platform.web.inference_plane import InferencePlane

MAX_PAGE: Final = 1000
DEFAULT_PAGE: Final = 20


def asks_for_model_info(request: Request) -> bool:
    """Return whether the client is one of Anthropic, whose headers its response then has. Raises `InvalidParameter`."""
    if not is_anthropic(request):
        return False
    check_version(request.headers)
    headers = response_headers_of(request.scope)
    headers.update(client_headers(request.headers, headers))
    return True


def model_info(plane: InferencePlane, model: ResolvedModel) -> ModelInfo:
    """Return one model."""
    return ModelInfo(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(plane.started if model.created is None else model.created, UTC),
        max_input_tokens=plane.pipeline.context_tokens,
        max_tokens=plane.pipeline.context_tokens,
    )


def model_page(request: Request, models: Sequence[ModelInfo]) -> ModelPage:
    """Return the page that `limit`, `after_id` and `before_id` name. Raises `InvalidParameter`."""
    asked = request.query_params
    limit = asked.get("limit", str(DEFAULT_PAGE))
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:5]) <= MAX_PAGE:
        raise InvalidParameter(f"`limit` must be an integer in 1..{MAX_PAGE}.", param="limit")
    places = {model.id: index for index, model in enumerate(models)}
    for name in ("after_id", "before_id"):
        if name in asked and asked[name] not in places:
            raise InvalidParameter(f"`{name}` is the `id` of no model.", param=name)
    begin = places[asked["after_id"]] + 1 if "after_id" in asked else 0
    end = places[asked["before_id"]] if "before_id" in asked else len(models)
    # A page before a model ends with the one next to it.
    backwards = "before_id" in asked and "after_id" not in asked
    found = models[begin:end]
    page = found[-int(limit) :] if backwards else found[: int(limit)]
    return ModelPage(
        data=[*page],
        has_more=len(page) < len(found),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )
