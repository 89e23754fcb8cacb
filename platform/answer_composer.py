"""From the form of an answer to a grammar that was tried and a reader of the answer, remembered per tenant.

Invariants: the engine hears of no grammar that its trial refused; what may take long runs off the event loop, one at a
time for each tenant, so that one tenant's schemas keep no other's waiting.
"""

import asyncio
from dataclasses import dataclass
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
from loraplex.grammar.tool_style import ToolStyle
from loraplex.platform.formed_answer import FormedAnswer, NotedJudgements
from loraplex.platform.services import AnswerJudges, GrammarTrials
from loraplex.platform.value_size import size_of

# Measured: composing takes up to 0.5 s for a schema of 1,600 characters with a hundred alternatives.
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
        key = await asyncio.to_thread(_digest, form, style)
        known = self._cache.peek(namespace, key)
        if known is not None:
            return known
        turn = self._turns.setdefault(namespace, asyncio.Lock())
        build = partial(self._build, form, style)
        async with turn, self._threads:
            return await asyncio.to_thread(self._cache.get, namespace, key, build)

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
        return Composed(composition, judgements, ENTRY_BYTES + 3 * (len(repr(form)) + len(source)))


def _digest(form: AnswerForm, style: ToolStyle) -> bytes:
    return blake2b(f"{style} {form!r}".encode(), digest_size=32).digest()


def _is_small(form: AnswerForm) -> bool:
    values: list[object] = [tool.parameters for tool in form.tools]
    match form.format:
        case JsonSchema(schema=schema):
            values.append(schema)
        case StructuralTag(tag=inside) | Choice(options=inside):
            values.append(inside)
        case Regex(pattern=text) | ContextFreeGrammar(text=text):
            values.append(text)
    return size_of(values, INLINE_SIZE) <= INLINE_SIZE


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
