"""The options of a profile on the command line: `--tool-style` and `--defaults`, checked as over HTTP."""

from typing import Annotated

import typer

from loraplex.platform.errors import GatewayError
from loraplex.platform.parameters.adapter_profile import read_profile_change
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.tenants.models import TOOL_STYLES
from loraplex.tenants.registry.adapters import ProfileChange

NO_STYLE = "none"
LIMITS = BodyLimits(max_bytes=4096, max_depth=2, max_values=100)

ToolStyle = Annotated[
    str | None,
    typer.Option("--tool-style", help=f"{', '.join(TOOL_STYLES)}, or {NO_STYLE}: that of the base model."),
]
Defaults = Annotated[
    str | None,
    typer.Option("--defaults", help="Sampling defaults as JSON, for example '{\"temperature\": 0.2}'."),
]


def profile_change(tool_style: str | None, defaults: str | None) -> ProfileChange:
    """What the given options change. Raises `typer.BadParameter`."""
    body: dict[str, object] = {}
    try:
        if tool_style is not None:
            body["tool_style"] = None if tool_style == NO_STYLE else tool_style
        if defaults is not None:
            body["defaults"] = parse_object(defaults.encode(), LIMITS)
        return read_profile_change(body)
    except GatewayError as error:
        raise typer.BadParameter(str(error)) from error
