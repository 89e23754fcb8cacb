"""The playground: `/console/playground`, and its check of schemas. Answers come from the API, which its script calls."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.form_routes import FormSubmission, submits
from loraplex.platform.web.console.page import PageRequest, opens
from loraplex.platform.web.playground.queries import FIRST, FURTHER, find_models, parameter_fields
from loraplex.tenants.scopes import INFERENCE

Reader = Annotated[PageRequest, opens(INFERENCE)]
Submission = Annotated[FormSubmission, submits(INFERENCE)]
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


router = APIRouter()


@router.get("/console/playground")
async def playground(page: Reader, model: str = "", against: str = "") -> Response:
    dependencies = page.dependencies
    models = await page.query(find_models, page.tenant_id, dependencies.served_model_name)
    return page.show(
        "playground/playground.html",
        models=models,
        currency=models[0].currency,
        model=model,
        against=against,
        context=dependencies.engine.info().max_model_len,
        first=parameter_fields(FIRST),
        given={"temperature": 0} if page.endpoint.is_demo else {},
        further=parameter_fields(FURTHER),
        starter_schema=indented(STARTER_SCHEMA),
        starter_tools=indented(STARTER_TOOLS),
    )


@router.get("/console/playground/decision")
async def decision(page: Reader, model: str = "") -> Response:
    """The form of a decision, which its script sends to the API."""
    models = await page.query(find_models, page.tenant_id, page.dependencies.served_model_name)
    return page.show("playground/decision.html", models=models, currency=models[0].currency, model=model)


@router.post("/console/playground/schema")
async def check_schema(submission: Submission) -> Response:
    """Say what would become of a schema as the form of an answer."""
    form, checks = submission.form, submission.http.app.state.schema_checks
    namespace = submission.dependencies.namespace_of(submission.tenant_id)
    result = await checks.of_text(namespace, form.text("schema"), strict=form.text("strict") == "true")
    return submission.fragment("playground/schema_result.html", "result", result=result)


def indented(document: object) -> str:
    """Write JSON for a reader."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode()
