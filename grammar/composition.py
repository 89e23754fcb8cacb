"""From what a request asks to one grammar of one backend and the reader of its answers. Invariant: every schema in play
is held by that backend exactly, or judged on the finished value.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from loraplex.grammar.answer_form import AnswerForm, Limits
from loraplex.grammar.answer_pieces import AnswerReader
from loraplex.grammar.holding import Enforcement
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tool_style import ToolStyle


@dataclass(frozen=True, slots=True)
class Composition:
    """`spec` None: the answer is unconstrained. `enforcement` None: no schema is in play. `reader`: one per choice.

    `keep_special_tokens`: calls are marked by control tokens, so the text must be decoded with them.
    """

    spec: GrammarSpec | None
    enforcement: Enforcement | None
    reader: Callable[[], AnswerReader]
    keep_special_tokens: bool


def compose(
    form: AnswerForm, style: ToolStyle, *, limits: Limits, control_tokens: Collection[str] = ()
) -> Composition:
    """The grammar of `form`. `control_tokens`: the texts of the tokenizer's special tokens. Raises `GrammarRefused`."""
    raise NotImplementedError
