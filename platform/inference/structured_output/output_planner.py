"""From the form of an answer to a grammar that was tried and a reader of the answer, remembered per tenant.

Invariants: the engine hears of no grammar that its trial refused; what may take long is composed in another process, and
once for all of a tenant who ask for it at the same time.
"""

import asyncio
from collections.abc import Collection, Iterator
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import Final
from weakref import WeakValueDictionary

from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonSchema,
    OutputConstraints,
    Regex,
    SchemaLimits,
    StructuralTag,
)
from loraplex.grammar.errors import GrammarTooLarge, WorkersUnavailable
from loraplex.grammar.tenant_cache import TenantCache
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.inference.dependencies import CompileChecks, RequestAnalysis, ValueValidation
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.parameters.json_object import size_of
from loraplex.platform.preparation.composed import CachedPlan, build_plan, constraints_size
from loraplex.platform.preparation.packed_form import pack_constraints

INLINE_SIZE: Final = 512
"""Composed on the event loop, in a millisecond or two."""
CACHE_BYTES: Final = 64 << 20
TENANT_CACHE_BYTES: Final = 8 << 20
QUEUE_TIMEOUT_S: Final = 120.0


class OutputPlanner:
    """Composes for one gateway, on its event loop."""

    def __init__(
        self,
        limits: SchemaLimits,
        control_tokens: Collection[str],
        preparation: RequestAnalysis,
        trials: CompileChecks,
        judges: ValueValidation,
    ) -> None:
        self._limits = limits
        self._control_tokens = control_tokens
        self._preparation = preparation
        self._trials = trials
        self._judges = judges
        self._cache: TenantCache[CachedPlan] = TenantCache(
            CACHE_BYTES, TENANT_CACHE_BYTES, attrgetter("size_bytes")
        )
        self._tenant_locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def plan(
        self, namespace: bytes, constraints: OutputConstraints, style: ToolStyle
    ) -> ConstrainedOutput:
        """Raises `GrammarRefused`, or `WorkersUnavailable`."""
        if constraints_size(constraints, INLINE_SIZE) <= INLINE_SIZE:
            cached = build_plan(constraints, style, self._limits, self._control_tokens)
        else:
            cached = await self._large(namespace, constraints, style)
        spec = cached.plan.spec
        if spec is not None:
            await self._trials.check(namespace, spec, param=_param(constraints))
        validate = partial(self._judges.judge, namespace)
        return ConstrainedOutput(cached.plan, validate)

    async def _large(self, namespace: bytes, constraints: OutputConstraints, style: ToolStyle) -> CachedPlan:
        lock = self._tenant_locks.setdefault(namespace, asyncio.Lock())
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S), lock:
                packed, key = await asyncio.to_thread(_packed, constraints, style, self._limits)
                cached = self._cache.get(namespace, key)
                if cached is None:
                    cached = await self._preparation.plan(namespace, packed)
                    self._cache.put(namespace, key, cached)
        except TimeoutError:
            raise WorkersUnavailable(
                f"no turn to compose this answer's form for {QUEUE_TIMEOUT_S:g} s"
            ) from None
        return cached


def _packed(constraints: OutputConstraints, style: ToolStyle, limits: SchemaLimits) -> tuple[bytes, bytes]:
    """The form as another process reads it, and what tells it from others.

    Raises `GrammarTooLarge` for a schema above its bound in any spelling: a text of megabytes, written at once, would stop
    the interpreter.
    """
    for value, param, limit in _bounded(constraints, limits):
        if size_of(value, limit) > limit:
            raise GrammarTooLarge(f"{param} has more than {limit} bytes", param=param, pointer="")
    packed = pack_constraints(constraints, style)
    return packed, blake2b(packed, digest_size=32).digest()


def _bounded(constraints: OutputConstraints, limits: SchemaLimits) -> Iterator[tuple[object, str, int]]:
    """(value, its field, most bytes)."""
    yield from ((tool.parameters, tool.param, limits.max_bytes) for tool in constraints.tools)
    match constraints.format:
        case JsonSchema(schema=schema, param=param):
            yield schema, param, limits.max_bytes
        case StructuralTag(tag=tag):
            yield tag, "structured_outputs.structural_tag", limits.max_bytes


def _param(constraints: OutputConstraints) -> str:
    """The field of the request that a grammar as a whole came from."""
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
