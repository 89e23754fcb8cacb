"""Whether a request thinks before it answers, and for how many tokens: one table of effort, budget, profile and template.

Invariant: what the prompt's own tokens say decides. A prompt that ends inside the thought has it open, one that ends behind it has none.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from loraplex.grammar.spec import Thought
from loraplex.grammar.thought import MAX_MARKER_BYTES, THINK, ThoughtCounter, ThoughtMarkers
from loraplex.platform.errors import InvalidParameter, UnsupportedParameter
from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.parameters.request_models import THOUGHT_SWITCHES, ChatRequest

Wish: TypeAlias = Literal["on", "off", "as the model does"]

EFFORT_TOKENS: Final[Mapping[str, int | None]] = {
    "minimal": 512,
    "low": 1024,
    "medium": 4096,
    "high": 16_384,
    "xhigh": 32_768,
    "max": None,
}
"""The most tokens of thought by effort, where a request names no budget."""
ANSWER_PART: Final = 5
"""Of `max_tokens`, a fifth is left for the answer by an effort: a budget alone may take all."""
_TAIL_TOKENS: Final = MAX_MARKER_BYTES + 8
"""The last tokens of a prompt that a marker, and blanks behind it, may take: a token has a byte at least."""


class ThoughtTokens:
    """Counts the tokens of one choice that are thought."""

    def __init__(self, thought: Thought, bytes_of: Callable[[int], tuple[str, bytes]]) -> None:
        self._counter = ThoughtCounter(ThoughtMarkers(thought.start, thought.end), begun=thought.begun)
        self._bytes_of = bytes_of

    def count(self, token_ids: Iterable[int]) -> int:
        """Take the next tokens; return how many are known to be thought by them."""
        return sum(self._counter.count(self._bytes_of(token)[1]) for token in token_ids)

    def rest(self, missing: int) -> int:
        """End the choice, of which `missing` tokens were generated and not delivered; return what else is thought."""
        return self._counter.rest(missing)


class ThoughtRules:
    """Applies the table to one base model's template."""

    def __init__(self, prompts: PromptRenderer, text: TokenText) -> None:
        self._prompts = prompts
        self._text = text

    def markers(self, style: str | Mapping[str, str] | None) -> ThoughtMarkers | None:
        """Return the markers of a profile's style, None for a model that does not think. `style` None: the base model's."""
        if style is None:
            return self._prompts.thought_markers
        if isinstance(style, Mapping):
            return ThoughtMarkers(style["start"], style["end"])
        return THINK if style == "think" else None

    def check(self, values: ChatRequest, markers: ThoughtMarkers | None) -> None:
        """Raises `InvalidParameter` for a thought that the model or the end of the prompt rules out."""
        budget = values.thinking_token_budget
        if markers is None and budget and "thinking_token_budget" in values.model_fields_set:
            message = "`thinking_token_budget` must be absent or 0: the model has no reasoning style, so it does not think."
            raise UnsupportedParameter(message, param="thinking_token_budget")
        if markers is not None and values.continue_final_message and _wish(values) == "on":
            name = "thinking_token_budget" if budget else "reasoning_effort"
            message = f"`{name}` must be absent with `continue_final_message`: an answer that has begun has no thought before it."
            raise InvalidParameter(message, param=name)

    def template_values(self, values: ChatRequest, known: Collection[str]) -> dict[str, object]:
        """Return what tells the template to think or not. `known`: the values that the request gives itself."""
        wish = _wish(values)
        if wish == "as the model does":
            return {}
        read = (THOUGHT_SWITCHES & self._prompts.option_names) - set(known)
        return dict.fromkeys(read, wish == "on")

    def ending(self, values: ChatRequest, markers: ThoughtMarkers, ids: Sequence[int]) -> list[int]:
        """Return the tokens that follow a rendered prompt: those that begin a thought, or end one that is not wanted."""
        wish = _wish(values)
        if _is_open_message(values) or wish == "as the model does":
            return []
        place, lines = self._place(markers, ids), "\n" if self._prompts.has_thought_lines(markers) else ""
        text, marker = self._prompts.continuation_ids, self._prompts.marker_ids
        if wish == "on" and place == "behind":
            name = "reasoning_effort" if values.thinking_token_budget is None else "thinking_token_budget"
            message = f"`{name}` asks for thought, but `chat_template_kwargs` or the chat template ends it before it begins."
            raise InvalidParameter(message, param=name)
        if wish == "on":
            return [] if place else [*marker(markers.start), *text(lines)]
        if place == "behind":
            return []
        begun = text(lines) if place else [*marker(markers.start), *text(lines * 2)]
        return [*begun, *marker(markers.end), *text(lines * 2)]

    def thought(
        self, values: ChatRequest, markers: ThoughtMarkers, ids: Sequence[int], max_tokens: int
    ) -> Thought | None:
        """Return the thought that an answer to the prompt `ids` may begin with, None for an answer without."""
        if _is_open_message(values):
            return None
        place = self._place(markers, ids)
        if place == "behind":
            return None
        most = _most(values, max_tokens)
        return Thought(start=markers.start, end=markers.end, most=most, begun=place == "inside")

    def is_ignored(self, values: ChatRequest, markers: ThoughtMarkers | None) -> bool:
        """Whether the request names an effort that nothing here can follow."""
        asked = values.reasoning_effort not in (None, "none")
        return asked and markers is None and not self._prompts.knows("reasoning_effort")

    def is_special(self, thought: Thought) -> bool:
        """Whether the markers are control tokens, which a text is otherwise decoded without."""
        return not self._prompts.special_tokens.isdisjoint((thought.start, thought.end))

    def _place(self, markers: ThoughtMarkers, ids: Sequence[int]) -> Literal["inside", "behind"] | None:
        """Where a prompt ends: in an open thought, behind one, or neither."""
        tail = self._text.text(ids[-_TAIL_TOKENS:]).rstrip()
        if tail.endswith(markers.start):
            return "inside"
        return "behind" if tail.endswith(markers.end) else None


def _wish(values: ChatRequest) -> Wish:
    budget, effort = values.thinking_token_budget, values.reasoning_effort
    if budget == 0 or (budget is None and effort == "none"):
        return "off"
    return "as the model does" if budget is None and effort is None else "on"


def _most(values: ChatRequest, max_tokens: int) -> int | None:
    if values.thinking_token_budget is not None:
        return min(values.thinking_token_budget, max_tokens)
    bound = EFFORT_TOKENS.get(values.reasoning_effort or "max")
    return None if bound is None else min(bound, max_tokens - max_tokens // ANSWER_PART)


def _is_open_message(values: ChatRequest) -> bool:
    """Whether the prompt ends in a message that the request itself has begun, or has no answer begun at all."""
    return values.continue_final_message or not values.add_generation_prompt
