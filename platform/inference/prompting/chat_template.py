"""Renders messages to prompt ids with the base model's own chat template, in the sandbox of transformers.

Invariant: only the template writes control tokens. A control token spelled in a message becomes plain text; without such
spellings the ids are exactly those of the tokenizer's own `apply_chat_template`.
"""

import inspect
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from jinja2 import meta
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer

from loraplex.grammar.constraints import Tool
from loraplex.grammar.thought import ThoughtMarkers, markers_of_template
from loraplex.grammar.tools.call_syntax import ToolStyle, style_of_template
from loraplex.platform.errors import InvalidParameter, UnsupportedParameter
from loraplex.platform.inference.prompting.control_tokens import TokenFragments
from loraplex.platform.inference.prompting.length_bound import length_bound
from loraplex.platform.inference.prompting.tool_messages import (
    as_text,
    called_names,
    template_message,
    template_tool,
    with_leading_system,
)
from loraplex.platform.parameters.chat_messages import ChatMessage

_PRIVATE_USE: Final = range(0xF0000, 0xFFFFE)
_PROBE: Final = "is a system message rendered"
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
"""The names by which templates read the thought of an assistant's message."""

LengthCheck: TypeAlias = Callable[[int], object]
"""Receives a number of tokens that a prompt certainly has, before it is tokenized; raises what refuses a prompt of so many."""


class Marks(NamedTuple):
    """Two characters absent from the messages: `inside` splits a control token, `edge` separates a text from adjacent text."""

    inside: str
    edge: str


class PromptRenderer:
    """One base model's tokenizer and template. Methods are pure and safe to call from several threads.

    Encoding uses a copy of the tokenizer that matches control tokens only by an unguessable alias, never by their text.
    After rendering, the template's control tokens are replaced by their aliases. Those of the messages were split by a
    marker before and remain text, and so do those that a message and the template spell together.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._template: str | None = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self._plain = _plain_copy(tokenizer.backend_tokenizer.to_str())
        special, control = _control_tokens(tokenizer, self._template or "")
        self.special_tokens = frozenset(special)
        self.style = style_of_template(
            self._template, [t.content for t in tokenizer.added_tokens_decoder.values()]
        )
        self._special_pattern, self._control_pattern = _any_of(special), _any_of(control)
        self._fragments = TokenFragments(control)
        self._aliases = {token: f"\U0010fffd{secrets.token_hex(16)}\U0010fffd" for token in control}
        self._encoder, self._alias_ids = _aliased(tokenizer.backend_tokenizer.to_str(), self._aliases)
        # The plain copy has no token that this one lacks: a bound of this one holds for it, too.
        self._length_bound = length_bound(self._encoder.to_str())
        self._control_ids = frozenset(self._alias_ids.values())
        self._bos_id: int | None = tokenizer.bos_token_id
        probe, user = {"role": "system", "content": _PROBE}, {"role": "user", "content": ""}
        self._renders_system = self._renders_probe([probe, user])
        self._renders_late_system = self._renders_probe([user, probe])
        self.option_names = _option_names(tokenizer, self._template)
        self.thought_markers = markers_of_template(self._template)
        self._added_ids = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        self._thoughts = [name for name in _THOUGHTS if self.knows(name)]

    def knows(self, word: str) -> bool:
        """Whether the chat template contains `word`."""
        return self._template is not None and word in self._template

    def writes_tools_as_text(self, style: ToolStyle) -> bool:
        """Whether tools and calls in `style` are written as text, because the template does not know them."""
        return style is ToolStyle.GENERIC or style is not self.style

    def chat_ids(
        self,
        messages: Sequence[ChatMessage],
        options: Mapping[str, object] | None = None,
        tools: Sequence[Tool] = (),
        style: ToolStyle | None = None,
        check: LengthCheck | None = None,
    ) -> list[int]:
        """Return the ids of the conversation, followed by the template's generation prompt.

        `options`: values of `option_names`, `add_generation_prompt` and `continue_final_message`.

        `style`: how the model spells calls; None: as its template does. A template that does not know the style gets
        tools, calls and results as text; one that knows system messages at the beginning alone gets others there or in the
        user's turn. Raises `InvalidParameter` when the template refuses the messages, and what `check`
        raises.
        """
        rendered, marks = self._rendered(messages, options or {}, tools, style or self.style)
        return self._encode(rendered, marks, check)

    def split_chat_ids(
        self,
        messages: Sequence[ChatMessage],
        texts: Sequence[str],
        options: Mapping[str, object],
        style: ToolStyle,
        check: LengthCheck,
    ) -> tuple[list[int], list[list[int]]]:
        """Return the ids of a conversation that ends in a user's message, without what closes that message, and for each of `texts`
        those of the text at its end, with all that follows. They are encoded apart, so that all texts share the first ones.

        Raises as `chat_ids`, and `UnsupportedParameter` where the template does not write that message as it is, once.
        """
        *earlier, last = messages
        place = secrets.token_hex(16)
        marked = replace(last, content=last.content + place)
        rendered, marks = self._rendered([*earlier, marked], options, (), style, texts)
        if rendered.count(place) != 1:
            message = "`messages` must end in a text that the model's chat template writes as it is, once."
            raise UnsupportedParameter(message, param="messages")
        begin, end = rendered.split(place)
        breaker = self._breaker(marks)
        return self._encode(begin, marks, check), [self._encode(breaker(text) + end, marks) for text in texts]

    def _rendered(
        self,
        messages: Sequence[ChatMessage],
        options: Mapping[str, object],
        tools: Sequence[Tool],
        style: ToolStyle,
        texts: Sequence[str] = (),
    ) -> tuple[str, Marks]:
        """Return what the template writes, and the marks in it, which `texts` do not have either."""
        if not self._renders_late_system:
            messages = with_leading_system(messages)
        if self.writes_tools_as_text(style):
            messages, tools = as_text(messages, tools, style, system=self._renders_system), ()
        names = called_names(messages)
        plain = [template_message(message, style, names, self._thoughts) for message in messages]
        offered = [template_tool(tool) for tool in tools]
        marks = _absent_characters([*plain, *offered, *options.values(), *texts])
        marked = [self._marked(message, marks) for message in plain]
        breaker = self._breaker(marks)
        known = {"tools": _mapped(offered, breaker)} if offered else {}
        given = {name: _mapped(value, breaker) for name, value in options.items()}
        return self._render(marked, {**given, **known}), marks

    def text_ids(self, text: str, check: LengthCheck | None = None, *, special: bool = True) -> list[int]:
        """Return the ids of a raw prompt. Control tokens count as such; a prompt begins with at most one begin token.

        `special`: add the tokens with which the tokenizer begins or ends a text.
        """
        # One begin token may be dropped.
        self._check_length(text, check, dropped=1)
        ids = _ids(self._plain, text, special=special)
        doubled = self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if doubled else ids

    def continuation_ids(self, text: str) -> list[int]:
        """Return the ids of a text that a model writes: no begin token, and control tokens count as text."""
        return _ids(self._encoder, text, special=False)

    def marker_ids(self, marker: str) -> list[int]:
        """Return the token that a marker of thought is, or those that spell it."""
        own = self._added_ids.get(marker)
        return self.continuation_ids(marker) if own is None else [own]

    def has_thought_lines(self, markers: ThoughtMarkers) -> bool:
        """Whether the template writes thought on lines of its own."""
        return self.knows(f"{markers.start}\n") or self.knows(f"{markers.start}\\n")

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens included: the inverse of `text_ids`, but for the tokens that this adds."""
        # `decode` would keep the interpreter's lock, as `encode` does.
        text: str = self._plain.decode_batch([[*ids]], skip_special_tokens=False)[0]
        return text

    def _marked(self, message: dict[str, Any], marks: Marks) -> dict[str, Any]:
        role, content = message["role"], message["content"]
        fields: dict[str, Any] = _mapped(message, self._breaker(marks))
        # Text of an assistant may contain the markup of its template (`</think>`), which templates look for.
        if role == "assistant":
            fields["content"] = self._neutralized(self._special_pattern, content, marks)
        fields["role"] = "system" if role == "developer" and not self.knows("developer") else role
        return fields

    def _breaker(self, marks: Marks) -> Callable[[str], str]:
        return lambda text: self._neutralized(self._control_pattern, text, marks)

    def _neutralized(self, pattern: re.Pattern[str], text: str, marks: Marks) -> str:
        return self._fragments.edged(_broken_up(pattern, text, marks.inside), marks.edge)

    def _renders_probe(self, messages: list[dict[str, Any]]) -> bool:
        try:
            return self._template is not None and _PROBE in self._render(messages, {})
        except InvalidParameter:
            return False

    def _render(self, messages: list[dict[str, Any]], options: Mapping[str, object]) -> str:
        if self._template is None:
            raise UnsupportedParameter(
                "`messages` is not supported: the model has no chat template.", param="messages"
            )
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                tokenize=False,
                **{"add_generation_prompt": True, **options},
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            if "continue_final_message" in options and isinstance(error, ValueError):
                # The text of transformers quotes the conversation.
                message = "The chat template changes the last message, so that it cannot be continued."
                raise InvalidParameter(message, param="continue_final_message") from None
            raise InvalidParameter(
                f"The chat template refuses `messages`: {error}", param="messages"
            ) from error
        return rendered

    def _check_length(self, text: str, check: LengthCheck | None, dropped: int = 0) -> None:
        if check is not None and self._length_bound is not None:
            check(self._length_bound.fewest_tokens(text) - dropped)

    def _encode(self, rendered: str, marks: Marks, check: LengthCheck | None = None) -> list[int]:
        # A token of one character cannot be split: its marker follows it.
        written = re.compile(f"(?:{self._control_pattern.pattern})(?!{marks.inside})")
        aliased = written.sub(lambda match: self._aliases[match.group()], rendered)
        aliased = aliased.replace(marks.inside, "").replace(marks.edge, "")
        self._check_length(aliased, check)
        ids = _ids(self._encoder, aliased, special=False)
        if not self._control_ids.isdisjoint(ids):
            raise InvalidParameter(
                "`messages` spell a control token that cannot be distinguished from text.", param="messages"
            )
        return [self._alias_ids.get(token_id, token_id) for token_id in ids]


def _ids(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    # `encode` would keep the interpreter's lock: a prompt of 2 MB blocked every other request for 1.8 s.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


def _option_names(tokenizer: Any, template: str | None) -> frozenset[str]:
    """The names that the template reads and the caller may set: not what it is given anyway, nor the special tokens."""
    if template is None:
        return frozenset()
    # Its environment alone knows the tags of chat templates.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment
        read = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError:
        # Every conversation is refused with the template's error.
        return frozenset()
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    return frozenset(read - taken - {"messages", "conversations"})


def _control_tokens(tokenizer: Any, template: str) -> tuple[list[str], list[str]]:
    """Return (special tokens, special tokens and other added tokens that the template writes) without white space."""
    added = tokenizer.added_tokens_decoder.values()
    special = [token.content for token in added if token.special]
    written = [token.content for token in added if token.content in template and not token.content.isspace()]
    return special, list(dict.fromkeys(special + written))


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _broken_up(pattern: re.Pattern[str], text: str, marker: str) -> str:
    """Insert the marker after every character of every control token, so that no part of one matches either."""
    return pattern.sub(lambda match: "".join(character + marker for character in match.group()), text)


def _absent_characters(values: Sequence[object]) -> Marks:
    used = set[str]().union(*(text for text in _strings(values) if not text.isascii()))
    unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    inside, edge = next(unused, None), next(unused, None)
    if inside is None or edge is None:
        raise InvalidParameter(
            "`messages` contains every character of a private-use plane.", param="messages"
        )
    return Marks(inside, edge)


def _strings(value: object) -> Iterator[str]:
    """Yield every string in a JSON value, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return the JSON value with every string changed, names too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value


def _plain_copy(serialized: str) -> Tokenizer:
    """Return a copy without truncation and padding, whose settings no other code changes."""
    copy = Tokenizer.from_str(serialized)
    copy.no_truncation()
    copy.no_padding()
    return copy


def _aliased(serialized: str, aliases: Mapping[str, str]) -> tuple[Tokenizer, dict[int, int]]:
    """Return (a copy that matches control tokens by alias only, ids of the aliases -> true ids)."""
    spec = json.loads(serialized)
    # Tokens marked special are the ones that `encode_special_tokens` stops matching.
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in aliases
    copy = _plain_copy(json.dumps(spec))
    for token in [token for token in spec["added_tokens"] if token["special"]]:
        flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip")}
        copy.add_tokens([AddedToken(aliases[token["content"]], normalized=False, special=False, **flags)])
    copy.encode_special_tokens = True
    ids = copy.get_vocab(with_added_tokens=True)
    return copy, {ids[alias]: ids[token] for token, alias in aliases.items()}
