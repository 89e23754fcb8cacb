"""How models spell tool calls: one `CallSyntax` per style.

Invariant: grammar, parser and prompt text are all built from it, so they cannot disagree.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class ToolStyle(StrEnum):
    """The styles that a base model or an adapter version can name. `generic` is for models trained on none."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The calls of an output are `opening`, one or more calls with `separator` between, `closing`.

    A call is `before_name`, the name, `before_arguments`, one JSON object, `after_arguments`.

    `marker` begins the calls and occurs in no text before them; its first character occurs in it only once. Without a
    marker the calls are the whole output, and text cannot begin as `opening` and `before_name` do.

    `tokens`: parts of this text that are one control token in some tokenizers.
    """

    marker: str | None
    opening: str
    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str
    closing: str
    tokens: tuple[str, ...] = ()

    def head(self, name: str) -> str:
        """Return the text before the arguments of a call of `name`."""
        return f"{self.before_name}{name}{self.before_arguments}"

    @property
    def beginning(self) -> str:
        """The start of an output of calls, up to the first name."""
        return self.opening + self.before_name


_SYNTAX: Final = {
    ToolStyle.HERMES: CallSyntax(
        marker="<tool_call>",
        opening="",
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}\n</tool_call>",
        separator="\n",
        closing="",
        tokens=("<tool_call>", "</tool_call>"),
    ),
    ToolStyle.LLAMA3: CallSyntax(
        marker=None,
        opening="",
        before_name='{"name": "',
        before_arguments='", "parameters": ',
        after_arguments="}",
        separator="; ",
        closing="",
    ),
    ToolStyle.MISTRAL: CallSyntax(
        marker="[TOOL_CALLS]",
        opening="[TOOL_CALLS][",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}",
        separator=", ",
        closing="]",
        tokens=("[TOOL_CALLS]",),
    ),
    ToolStyle.GENERIC: CallSyntax(
        marker="<tool_call>",
        opening="",
        before_name='<tool_call>{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}</tool_call>",
        separator="\n",
        closing="",
        tokens=("<tool_call>", "</tool_call>"),
    ),
}

_LLAMA3_TAGGED: Final = replace(
    _SYNTAX[ToolStyle.LLAMA3],
    marker="<|python_tag|>",
    opening="<|python_tag|>",
    tokens=("<|python_tag|>",),
)


def syntax_of(style: ToolStyle, *, beside_json: bool = False) -> CallSyntax:
    """Return the spelling of calls in `style`.

    `beside_json`: the output may be a JSON document instead. A bare JSON object could then not be distinguished from
    a call, so Llama 3's own token for calls precedes it.
    """
    return _LLAMA3_TAGGED if beside_json and style is ToolStyle.LLAMA3 else _SYNTAX[style]


def style_of_template(template: str | None, added_tokens: Collection[str] = ()) -> ToolStyle:
    """Find the style of a chat template by text search; `generic` if it renders no tools or in an unknown way.

    `added_tokens`: the texts of the tokenizer's added tokens. A template is read, never run.
    """
    if not renders_tools(template):
        return ToolStyle.GENERIC
    text = template or ""
    # Models with XML arguments have `<tool_call>` too, but no member "arguments".
    if "<tool_call>" in text and ('arguments"' in text or 'arguments\\"' in text):
        return ToolStyle.HERMES
    if "[TOOL_CALLS]" in text:
        return ToolStyle.MISTRAL
    python_tag = "<|python_tag|>" in text or "<|python_tag|>" in added_tokens
    if '"parameters"' in text and (python_tag or "ipython" in text):
        return ToolStyle.LLAMA3
    return ToolStyle.GENERIC


def renders_tools(template: str | None) -> bool:
    """Return whether a chat template mentions `tools` at all: many silently ignore them."""
    return template is not None and "tools" in template
