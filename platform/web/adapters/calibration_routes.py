"""Routes of the calibration of a version's decisions: the one that holds under the base model that is served now."""

from typing import Annotated, Final, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.decisions.calibration import MAX_TEMPERATURE, MIN_TEMPERATURE, Quality
from loraplex.platform.inference.decisions.wording import FORMAT
from loraplex.platform.web.adapters.routes import Reader, Writer
from loraplex.platform.web.adapters.version_routes import VERSION, Version
from loraplex.platform.web.openapi import described
from loraplex.platform.web.planes import TenantRequest
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented
from loraplex.tenants.administration import calibrations
from loraplex.tenants.registry import queries
from loraplex.tenants.registry.records import CalibrationDocument

PATH: Final = f"{VERSION}/decision-calibration"
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
Kind = Literal["predicate", "choice", "score"]

router = APIRouter()


class Measurement(RequestModel):
    """What a temperature changed on `examples` others than those that it was found on."""

    examples: int = Field(ge=1, le=100_000)
    before: Annotated[Quality, Field(title="QualityBefore")]
    after: Annotated[Quality, Field(title="QualityAfter")]


class NewCalibration(RequestModel):
    """`format` and `system_fingerprint`: those of the decisions that the temperatures were found on."""

    format: str = Field(max_length=16)
    system_fingerprint: str = Field(max_length=128)
    temperatures: dict[Kind, Temperature] = Field(min_length=1)
    report: dict[Kind, Measurement]


@router.get(PATH, responses=documented(response=CalibrationDocument))
async def get_calibration(request: Reader, name: str, version: Version) -> Response:
    return await request.read(
        queries.calibration, request.tenant_id, name, version, fingerprint_of(request), FORMAT
    )


@router.put(
    PATH,
    responses=documented(409, 422, response=CalibrationDocument),
    openapi_extra=described(NewCalibration, repeatable=True),
)
async def put_calibration(
    request: Writer,
    name: str,
    version: Version,
    body: Annotated[NewCalibration, request_model(NewCalibration)],
) -> Response:
    """Write the temperatures of a version's decisions, at any time; they count from the next request on."""
    # What an engine without a fingerprint serves is not known: nothing may hold for it.
    served = {"format": FORMAT, "system_fingerprint": fingerprint_of(request) or None}
    for field, now in served.items():
        if getattr(body, field) != now:
            message = f"`{field}` must be {now!r}, which is served now: measure again."
            raise InvalidParameter(message, param=field)
    return await request.run(calibrations.calibrate, request.tenant_id, name, version, **body.model_dump())


def fingerprint_of(request: TenantRequest) -> str:
    """Return the base model's; empty for an engine that tells none."""
    return request.dependencies.engine.info().system_fingerprint or ""
