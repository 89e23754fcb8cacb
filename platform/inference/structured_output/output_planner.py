"""Plans constrained output: a grammar that passed its compile check and the parser of its text, cached per tenant.

Invariants: no grammar that its compile check refused is sent to the engine. Large plans are built in a worker process, and
only once for the concurrent requests of a tenant with the same constraints.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import Final
from weakref import WeakValueDictionary

import structlog
from msgspec.structs import replace

from loraplex.grammar.builder.output_plan import OutputPlan
from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonSchema,
    OutputConstraints,
    Regex,
    SchemaLimits,
    StructuralTag,
)
from loraplex.grammar.errors import AnalysisFailed, GrammarTooLarge
from loraplex.grammar.spec import GrammarSpec, Thought
from loraplex.grammar.tenant_cache import TenantCache
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.errors import WorkersUnavailable
from loraplex.platform.inference.structured_output.build_task import (
    CachedPlan,
    build_plan,
    constraints_size,
    pack_constraints,
)
from loraplex.platform.inference.structured_output.compile_checks import CompileChecks
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.inference.structured_output.request_analysis import RequestAnalysis
from loraplex.platform.inference.structured_output.value_validation import ValueValidation
from loraplex.platform.parameters.json_object import size_of

INLINE_SIZE: Final = 512
"""Up to this size a plan is built on the event loop, in one or two milliseconds."""
CACHE_BYTES: Final = 64 << 20
TENANT_CACHE_BYTES: Final = 8 << 20
QUEUE_TIMEOUT_S: Final = 120.0


class OutputPlanner:
    """Plans the output of one gateway's requests, on its event loop."""

    def __init__(
        self,
        limits: SchemaLimits,
        control_tokens: Collection[str],
        request_analysis: RequestAnalysis,
        compile_checks: CompileChecks,
        value_validation: ValueValidation,
    ) -> None:
        self._limits = limits
        self._control_tokens = control_tokens
        self._request_analysis = request_analysis
        self._compile_checks = compile_checks
        self._value_validation = value_validation
        self._cache: TenantCache[CachedPlan] = TenantCache(
            CACHE_BYTES, TENANT_CACHE_BYTES, attrgetter("size_bytes")
        )
        self._tenant_locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._failures: Counter[str] = Counter()
        self._log = structlog.get_logger("loraplex.structured_output")

    async def plan(
        self,
        namespace: bytes,
        constraints: OutputConstraints | None,
        style: ToolStyle,
        thought: Thought | None = None,
    ) -> ConstrainedOutput:
        """Build the output plan and check its grammar. Raises `GrammarRefused`, or `WorkersUnavailable`.

        Without `constraints`, any text follows the `thought`.
        """
        validate = partial(self._value_validation.validate, namespace)
        if constraints is None:
            return ConstrainedOutput(OutputPlan(None), validate, "thinking_token_budget", thought)
        try:
            if constraints_size(constraints, INLINE_SIZE) <= INLINE_SIZE:
                cached = build_plan(constraints, style, self._limits, self._control_tokens)
            else:
                cached = await self._large(namespace, constraints, style)
        except AnalysisFailed as error:
            reason = str(error)
            self._failures[reason] += 1
            self._log.error("analysis failed", reason=reason, param=error.param, count=self._failures[reason])
            raise
        spec, param = cached.plan.spec, _param(constraints)
        if spec is not None:
            await self._compile_checks.check(namespace, replace(spec, inputs=()), param=param)
            held = [tool.param for tool in constraints.tools if tool.input is not None]
            for each, where in zip(spec.inputs, held, strict=True):
                await self._compile_checks.check(
                    namespace, GrammarSpec(backend="llguidance", source=each.source), param=where
                )
        return ConstrainedOutput(cached.plan, validate, param, thought)

    async def _large(self, namespace: bytes, constraints: OutputConstraints, style: ToolStyle) -> CachedPlan:
        lock = self._tenant_locks.setdefault(namespace, asyncio.Lock())
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S), lock:
                packed, key = await asyncio.to_thread(_packed, constraints, style, self._limits)
                cached = self._cache.get(namespace, key)
                if cached is None:
                    cached = await self._request_analysis.plan(namespace, packed)
                    self._cache.put(namespace, key, cached)
        except TimeoutError:
            raise WorkersUnavailable(
                f"the grammar of this request could not be built within {QUEUE_TIMEOUT_S:g} s"
            ) from None
        return cached


def _packed(constraints: OutputConstraints, style: ToolStyle, limits: SchemaLimits) -> tuple[bytes, bytes]:
    """Return the packed constraints and their cache key.

    Raises `GrammarTooLarge` for a schema that exceeds its bound in any spelling: encoding megabytes in one call would block
    the interpreter.
    """
    for value, param, limit in _bounded(constraints, limits):
        if size_of(value, limit) > limit:
            raise GrammarTooLarge(f"{param} has more than {limit} bytes", param=param, pointer="")
    packed = pack_constraints(constraints, style)
    return packed, blake2b(packed, digest_size=32).digest()


def _bounded(constraints: OutputConstraints, limits: SchemaLimits) -> Iterator[tuple[object, str, int]]:
    """Yield (value, its field, maximum bytes)."""
    yield from ((tool.parameters, tool.param, limits.max_bytes) for tool in constraints.tools)
    match constraints.format:
        case JsonSchema(schema=schema, param=param):
            yield schema, param, limits.max_bytes
        case StructuralTag(tag=tag):
            yield tag, "structured_outputs.structural_tag", limits.max_bytes


def _param(constraints: OutputConstraints) -> str:
    """Return the field of the request that a whole grammar is attributed to."""
    if constraints.tools:
        return "tools"
    match constraints.format:
        case JsonSchema(param=param):
            return param
        case Regex():
            return "structured_outputs.regex"
        case Choice():
            return "structured_outputs.choice"
        case ContextFreeGrammar():
            return "structured_outputs.grammar"
        case StructuralTag():
            return "structured_outputs.structural_tag"
        case _:
            return "response_format"
