"""What would become of a schema as the format of an answer: planned and compile-checked as a request's, without a request.

Invariant: a schema gets the result that a request with it would get, from the same limits and the same worker processes.
"""

import time
from dataclasses import dataclass
from typing import Any, Final, Literal

from loraplex.grammar.constraints import JsonSchema, OutputConstraints
from loraplex.grammar.enforcement.enforcement_plan import UnenforcedKeyword
from loraplex.grammar.errors import GrammarInvalid, GrammarRefused, JsonRefused
from loraplex.grammar.strict_json import check_values, parse_json
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.parameters.json_object import BodyLimits

PARAM: Final = "schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaCheckResult:
    """`full`: the grammar admits valid documents only. `validated`: `unenforced` is checked on the finished document.

    `refused`: `reason` says why, and `pointer` where, as a JSON Pointer that is empty for the whole schema. `backend` and
    `milliseconds` are of the compile check, or of its cached result; `backend` is empty for a refusal.
    """

    enforcement: Literal["full", "validated", "refused"]
    backend: str = ""
    milliseconds: float = 0.0
    unenforced: tuple[UnenforcedKeyword, ...] = ()
    reason: str = ""
    pointer: str = ""


class SchemaChecks:
    """Checks the schemas of all tenants, with the planner and the workers of one gateway."""

    def __init__(self, dependencies: GatewayDependencies) -> None:
        self._dependencies = dependencies
        self._planner = dependencies.output_planner()

    async def of_text(self, namespace: bytes, text: str, *, strict: bool) -> SchemaCheckResult:
        """Check a schema as JSON text. `strict` refuses what would only be validated.

        Raises `Overloaded`, and `WorkersUnavailable` where no check is possible.
        """
        begun = time.monotonic()
        try:
            schema = _parsed(text, self._dependencies.config.body)
            wanted = OutputConstraints(format=JsonSchema(schema, strict, PARAM))
            planned = (await self._planner.plan(namespace, wanted, ToolStyle.GENERIC)).plan
        except GrammarRefused as error:
            return SchemaCheckResult(enforcement="refused", reason=str(error), pointer=error.pointer or "")
        return SchemaCheckResult(
            enforcement="validated" if planned.unenforced else "full",
            backend="" if planned.spec is None else planned.spec.backend,
            milliseconds=(time.monotonic() - begun) * 1e3,
            unenforced=planned.unenforced,
        )


def _parsed(text: str, limits: BodyLimits) -> dict[str, Any]:
    """Parse a schema as a body is parsed. Raises `GrammarInvalid`."""
    try:
        schema = parse_json(text, max_digits=limits.max_digits)
        check_values(schema, max_depth=limits.max_depth, max_values=limits.max_values, encodable=True)
    except JsonRefused as error:
        raise GrammarInvalid(f"the schema {error}", pointer="") from error
    except ValueError as error:
        raise GrammarInvalid(f"the schema is not JSON: {error}", pointer="") from error
    if not isinstance(schema, dict):
        raise GrammarInvalid("the schema must be a JSON object", pointer="")
    return schema
