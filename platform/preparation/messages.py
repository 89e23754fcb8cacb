"""What a gateway asks of its preparing process, and what it is told: a length of eight bytes and a pickle each.

Invariant: whatever that process says is read as data and classes of ours only; no function can be named.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from loraplex.grammar.answer_form import AnswerForm, Limits
from loraplex.grammar.tool.style import ToolStyle
from loraplex.platform.preparation.composed import Composed
from loraplex.platform.request_body import BodyLimits

LENGTH_BYTES: Final = 8
OUR_MODULES: Final = ("loraplex.grammar.", "loraplex.platform.")
MAKERS: Final = frozenset(
    {("functools", "partial"), ("builtins", "frozenset"), ("msgspec._utils", "rebuild")}
)
"""What else makes an object out of a class and its fields."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Said first. `control_tokens`: the texts of the tokenizer's special tokens."""

    body: BodyLimits
    grammar: Limits
    control_tokens: frozenset[str]


@dataclass(frozen=True, slots=True)
class CheckBody:
    """Is this a JSON object within the bounds? Answered by None."""

    body: bytes


@dataclass(frozen=True, slots=True)
class ComposeForm:
    """Answered by a `Composed`. `packed` is what `pack_form` made."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """`refusal` is what the request deserves instead of a result."""

    result: Composed | None = None
    refusal: Exception | None = None


Task: TypeAlias = CheckBody | ComposeForm
Message: TypeAlias = Setup | Task | Answer


def frame(message: Message) -> bytes:
    """The message as it is written to a pipe."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def length(head: bytes) -> int:
    """How many bytes follow the first `LENGTH_BYTES`."""
    return int.from_bytes(head, "big")


def read_message(data: bytes) -> Any:
    """A message without its length. Raises `pickle.UnpicklingError` for what names something else than classes of ours."""
    return _OwnClasses(io.BytesIO(data)).load()


def pack_form(form: AnswerForm, style: ToolStyle) -> bytes:
    """Equal bytes mean equal forms, not the other way round."""
    return pickle.dumps((form, style), pickle.HIGHEST_PROTOCOL)


def unpack_form(packed: bytes) -> tuple[AnswerForm, ToolStyle]:
    form, style = _OwnClasses(io.BytesIO(packed)).load()
    return form, style


class _OwnClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        found: Callable[..., Any]
        if (module, name) in MAKERS:
            found = super().find_class(module, name)
            return found
        if module.startswith(OUR_MODULES):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no class that may be said here")
