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
from loraplex.platform.preparation.composed import CachedPlan, compose_form, form_size
from loraplex.platform.preparation.packed_form import pack_form

INLINE_SIZE: Final = 512
"""Composed on the event loop, in a millisecond or two."""
CACHE_BYTES: Final = 64 << 20
TENANT_CACHE_BYTES: Final = 8 << 20
PATIENCE_S: Final = 120.0


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
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def compose(self, namespace: bytes, form: OutputConstraints, style: ToolStyle) -> ConstrainedOutput:
        """Raises `GrammarRefused`, or `WorkersUnavailable`."""
        if form_size(form, INLINE_SIZE) <= INLINE_SIZE:
            composed = compose_form(form, style, self._limits, self._control_tokens)
        else:
            composed = await self._large(namespace, form, style)
        spec = composed.composition.spec
        if spec is not None:
            await self._trials.check(namespace, spec, param=_param(form))
        judge = partial(self._judges.validate, namespace)
        return ConstrainedOutput(composed.composition, judge)

    async def _large(self, namespace: bytes, form: OutputConstraints, style: ToolStyle) -> CachedPlan:
        turn = self._turns.setdefault(namespace, asyncio.Lock())
        try:
            async with asyncio.timeout(PATIENCE_S), turn:
                packed, key = await asyncio.to_thread(_packed, form, style, self._limits)
                composed = self._cache.get(namespace, key)
                if composed is None:
                    composed = await self._preparation.compose(namespace, packed)
                    self._cache.put(namespace, key, composed)
        except TimeoutError:
            raise WorkersUnavailable(f"no turn to compose this answer's form for {PATIENCE_S:g} s") from None
        return composed


def _packed(form: OutputConstraints, style: ToolStyle, limits: SchemaLimits) -> tuple[bytes, bytes]:
    """The form as another process reads it, and what tells it from others.

    Raises `GrammarTooLarge` for a schema above its bound in any spelling: a text of megabytes, written at once, would stop
    the interpreter.
    """
    for value, param, most in _bounded(form, limits):
        if size_of(value, most) > most:
            raise GrammarTooLarge(f"{param} has more than {most} bytes", param=param, pointer="")
    packed = pack_form(form, style)
    return packed, blake2b(packed, digest_size=32).digest()


def _bounded(form: OutputConstraints, limits: SchemaLimits) -> Iterator[tuple[object, str, int]]:
    """(value, its field, most bytes)."""
    yield from ((tool.parameters, tool.param, limits.max_bytes) for tool in form.tools)
    match form.format:
        case JsonSchema(schema=schema, param=param):
            yield schema, param, limits.max_bytes
        case StructuralTag(tag=tag):
            yield tag, "structured_outputs.structural_tag", limits.max_bytes


def _param(form: OutputConstraints) -> str:
    """The field of the request that a grammar as a whole came from."""
    if form.tools:
        return "tools"
    match form.format:
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
