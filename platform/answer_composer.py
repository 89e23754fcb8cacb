"""From the form of an answer to a grammar that was tried and a reader of the answer, remembered per tenant.

Invariants: the engine hears of no grammar that its trial refused; what may take long runs off the event loop, one at a
time for each tenant, so that one tenant's schemas keep no other's waiting.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Final
from weakref import WeakValueDictionary

from loraplex.grammar.answer_form import (
    AnswerForm,
    Choice,
    ContextFreeGrammar,
    JsonSchema,
    Limits,
    Regex,
    StructuralTag,
)
from loraplex.grammar.compiled_cache import CompiledCache
from loraplex.grammar.composition import Composition, compose
from loraplex.grammar.errors import GrammarTooLarge
from loraplex.grammar.tool_style import ToolStyle
from loraplex.platform.formed_answer import FormedAnswer, NotedJudgements
from loraplex.platform.services import AnswerJudges, GrammarTrials
from loraplex.platform.value_size import size_of

# Measured: composing takes up to 0.3 s for a schema at the bound of 10,000 values.
INLINE_SIZE: Final = 256
THREADS: Final = 2
CACHE_BYTES: Final = 64 << 20
TENANT_CACHE_BYTES: Final = 8 << 20
ENTRY_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Composed:
    """`size_bytes` is an estimate: what the form and the grammar take as text, a few times."""

    composition: Composition
    judgements: NotedJudgements
    size_bytes: int


class AnswerComposer:
    """Composes for one gateway, on its event loop."""

    def __init__(
        self, limits: Limits, control_tokens: frozenset[str], trials: GrammarTrials, judges: AnswerJudges
    ) -> None:
        self._limits = limits
        self._control_tokens = control_tokens
        self._trials = trials
        self._judges = judges
        self._cache: CompiledCache[Composed] = CompiledCache(CACHE_BYTES, TENANT_CACHE_BYTES)
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._threads = asyncio.Semaphore(THREADS)

    async def compose(self, namespace: bytes, form: AnswerForm, style: ToolStyle) -> FormedAnswer:
        """Raises `GrammarRefused`, or `TrialsUnavailable`."""
        if _is_small(form):
            composed = self._build(form, style)
        else:
            composed = await self._large(namespace, form, style)
        spec = composed.composition.spec
        if spec is not None:
            await self._trials.check(namespace, spec, param=_param(form))
        judge = partial(self._judges.judge, namespace)
        return FormedAnswer(composed.composition, composed.judgements, judge)

    async def _large(self, namespace: bytes, form: AnswerForm, style: ToolStyle) -> Composed:
        key = await asyncio.to_thread(_key, form, style, self._limits)
        known = self._cache.peek(namespace, key)
        if known is not None:
            return known
        turn = self._turns.setdefault(namespace, asyncio.Lock())
        build = partial(self._build, form, style)
        async with turn, self._threads:
            building = asyncio.create_task(asyncio.to_thread(self._cache.get, namespace, key, build))
            try:
                return await asyncio.shield(building)
            finally:
                # A thread cannot be stopped: who leaves before it ends keeps its tenant's turn until then.
                await asyncio.wait((building,))
                building.exception()

    def _build(self, form: AnswerForm, style: ToolStyle) -> Composed:
        judgements = NotedJudgements()
        composition = compose(
            form,
            style,
            limits=self._limits,
            control_tokens=self._control_tokens,
            judge_of=judgements.judge_of,
        )
        source = "" if composition.spec is None else composition.spec.source
        size = size_of(_inside(form), TENANT_CACHE_BYTES) + len(source)
        return Composed(composition, judgements, ENTRY_BYTES + 4 * size)


def _key(form: AnswerForm, style: ToolStyle, limits: Limits) -> bytes:
    """What tells forms apart, made piece by piece: a text of megabytes at once would stop the interpreter.

    Raises `GrammarTooLarge` for a schema whose text is above its bound in any spelling.
    """
    for value, param, most in _bounded(form, limits):
        if size_of(value, most) > most:
            raise GrammarTooLarge(f"{param} has more than {most} bytes", param=param, pointer="")
    pieces: list[object] = [style, replace(form, tools=(), format=None), type(form.format), *form.tools]
    pieces += form.format.options if isinstance(form.format, Choice) else (form.format,)
    key = blake2b(digest_size=32)
    for piece in pieces:
        key.update(f"{piece!r}\n".encode())
    return key.digest()


def _bounded(form: AnswerForm, limits: Limits) -> Iterator[tuple[object, str, int]]:
    """(value, its field, most bytes)."""
    yield from ((tool.parameters, tool.param, limits.max_bytes) for tool in form.tools)
    match form.format:
        case JsonSchema(schema=schema, param=param):
            yield schema, param, limits.max_bytes
        case StructuralTag(tag=tag):
            yield tag, "structured_outputs.structural_tag", limits.max_bytes


def _is_small(form: AnswerForm) -> bool:
    return size_of(_inside(form), INLINE_SIZE) <= INLINE_SIZE


def _inside(form: AnswerForm) -> list[object]:
    """What a grammar is made of."""
    values: list[object] = [tool.parameters for tool in form.tools]
    match form.format:
        case JsonSchema(schema=inside) | StructuralTag(tag=inside) | Choice(options=inside):
            values.append(inside)
        case Regex(pattern=text) | ContextFreeGrammar(text=text):
            values.append(text)
    return values


def _param(form: AnswerForm) -> str:
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
