"""`/v1/models`: the base model and the adapters that the caller may use, also in the shape for clients of Anthropic."""

from typing import Annotated

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.web.anthropic.models import asks_for_model_info, model_info, model_page
from loraplex.platform.web.inference_plane import InferencePlane, json_response, plane_of, requires_inference
from loraplex.platform.web.openai.response_models import ModelCard, ModelList, encoded
from loraplex.platform.web.responses import documented

router = APIRouter()


@router.get("/models", responses=documented(response=ModelList))
async def models(request: Request, caller: Annotated[Caller, requires_inference()]) -> Response:
    plane = plane_of(request)
    async with plane.transactions.slot(caller.tenant_id):
        found = await plane.pipeline.models.list(caller)
    if asks_for_model_info(request):
        page = model_page([model_info(plane, each) for each in found])
        return json_response(page.model_dump_json().encode())
    cards = [_card(plane, each) for each in found]
    return json_response(encoded(ModelList(object="list", data=cards)))


@router.get("/models/{name:path}", responses=documented(response=ModelCard))
async def one_model(name: str, request: Request, caller: Annotated[Caller, requires_inference()]) -> Response:
    plane = plane_of(request)
    async with plane.transactions.slot(caller.tenant_id):
        found = await plane.pipeline.models.read(caller, name)
    if asks_for_model_info(request):
        return json_response(model_info(plane, found).model_dump_json().encode(), found.headers())
    return json_response(encoded(_card(plane, found)), found.headers())


def _card(plane: InferencePlane, model: ResolvedModel) -> ModelCard:
    return ModelCard(
        id=model.name,
        object="model",
        created=plane.started if model.created is None else model.created,
        owned_by="loraplex",
        root=model.adapter or model.name,
        parent=None if model.adapter is None else plane.dependencies.served_model_name,
        system_fingerprint=plane.dependencies.engine.info().system_fingerprint,
        max_model_len=plane.pipeline.encoder.context_tokens,
    )
