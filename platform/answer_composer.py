"""From the parameters that shape an answer to a grammar that was tried and a reader of the answer.

Invariant: the engine hears of no grammar that its trial refused, and large ones are composed off the event loop.
"""

import asyncio
from functools import partial
from typing import Final

from loraplex.grammar.answer_form import (
    AnswerForm,
    Choice,
    ContextFreeGrammar,
    JsonSchema,
    Regex,
    StructuralTag,
)
from loraplex.grammar.composition import Composition, compose
from loraplex.grammar.tool_style import ToolStyle
from loraplex.platform.services import GatewayServices
from loraplex.platform.value_size import size_of

INLINE_SIZE: Final = 8_192


async def compose_answer(
    services: GatewayServices, namespace: bytes, form: AnswerForm, style: ToolStyle
) -> Composition:
    """Raises `GrammarRefused`, or `TrialsUnavailable`."""
    work = partial(
        compose,
        form,
        style,
        limits=services.limits.grammar,
        control_tokens=services.prompts.special_tokens,
    )
    composition = work() if _size(form) <= INLINE_SIZE else await asyncio.to_thread(work)
    if composition.spec is not None:
        await services.trials.check(namespace, composition.spec, param=_param(form))
    return composition


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


def _size(form: AnswerForm) -> int:
    values: list[object] = [tool.parameters for tool in form.tools]
    match form.format:
        case JsonSchema(schema=schema):
            values.append(schema)
        case StructuralTag(tag=tag):
            values.append(tag)
        case _:
            values.append(str(form.format))
    return size_of(values, INLINE_SIZE)
