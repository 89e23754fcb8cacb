"""The playground: `/console/playground`, and its check of schemas. Answers come from the API, which its script calls."""

from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.inference.schema_check import SchemaChecks
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Form, read_form
from loraplex.platform.web.console.legacy_forms import tenant_of
from loraplex.platform.web.playground.queries import (
    FIRST,
    FURTHER,
    PlaygroundModel,
    find_models,
    parameter_fields,
)

SCOPE: Final = "inference"
# What the page shows before anything was asked: a schema and a tool that any model understands.
STARTER_SCHEMA: Final = {
    "type": "object",
    "required": ["last_departure", "pier"],
    "additionalProperties": False,
    "properties": {
        "last_departure": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
        "pier": {"type": "string"},
    },
}
STARTER_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "ferry_times",
            "description": "Departures of a ferry on a day",
            "parameters": {
                "type": "object",
                "required": ["to", "day"],
                "additionalProperties": False,
                "properties": {"to": {"type": "string"}, "day": {"enum": ["sunday", "weekday"]}},
            },
        },
    }
]


def playground_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the playground."""
    router = APIRouter()
    allowed = Depends(endpoint.requires(SCOPE))
    _add_page(router, endpoint, allowed)
    _add_schema_check(router, endpoint, allowed)
    return router


def _add_page(router: APIRouter, endpoint: ConsoleEndpoint, allowed: Any) -> None:
    served, engine = endpoint.dependencies.served_model_name, endpoint.dependencies.engine

    @router.get("/console/playground")
    async def playground(
        request: Request,
        session: Annotated[ConsoleSession, allowed],
        model: str = "",
        against: str = "",
    ) -> Response:
        tenant_id = tenant_of(session)

        async def find(transaction: AsyncSession) -> list[PlaygroundModel]:
            return [*await find_models(transaction, tenant_id, served)]

        models = await endpoint.query(session, find)
        names = [each.name for each in models]
        chosen = model if model in names else names[0]
        return endpoint.page(
            request,
            session,
            "playground/playground.html",
            models=models,
            currency=models[0].currency,
            chosen=chosen,
            chosen_given=model in names,
            against=against if against in names else None,
            second=next((name for name in names if name != chosen), chosen),
            context=engine.info().max_model_len,
            first=parameter_fields(FIRST),
            given={"temperature": 0} if endpoint.is_demo else {},
            further=parameter_fields(FURTHER),
            starter_schema=indented(STARTER_SCHEMA),
            starter_tools=indented(STARTER_TOOLS),
        )


def _add_schema_check(router: APIRouter, endpoint: ConsoleEndpoint, allowed: Any) -> None:
    checks, namespace_of = SchemaChecks(endpoint.dependencies), endpoint.dependencies.namespace_of

    @router.post("/console/playground/schema")
    async def schema(
        request: Request,
        session: Annotated[ConsoleSession, allowed],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        """Say what would become of a schema as the form of an answer."""
        namespace = namespace_of(tenant_of(session))
        result = await checks.of_text(namespace, form.text("schema"), strict=form.text("strict") == "true")
        return endpoint.fragment(request, session, "playground/schema_result.html", "result", result=result)


def indented(document: object) -> str:
    """Write JSON for a reader."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode()
