"""Makes output items and their events from the deltas of an answer (OpenAI Responses API).

Invariant: items and the events that lead to them come from one place, so a stream and a whole response cannot differ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias

from loraplex.grammar.parsing.deltas import ContentDelta, OutputDelta, ReasoningDelta, ToolCallStart
from loraplex.platform.parameters.responses_tools import ToolName
from loraplex.platform.web.openai.response_models import ChosenTokenLogprob
from loraplex.platform.web.openai.responses.input_text import InputText

Event: TypeAlias = dict[str, Any]
Seal: TypeAlias = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _Type:
    """What items of one type have. `prefix`: of their ids. `events`: the name of those of their text. `field`: where that text stands,
    the one part of a `content`, or a field of its own.
    """

    name: str
    prefix: str
    events: str
    field: str


_MESSAGE: Final = _Type("message", "msg", "output_text", "content")
_THOUGHT: Final = _Type("reasoning", "rs", "reasoning_text", "content")
_CALL: Final = _Type("function_call", "fc", "function_call_arguments", "arguments")
_CUSTOM_CALL: Final = _Type("custom_tool_call", "ctc", "custom_tool_call_input", "input")


class _Item:
    """One output item, from its first event to its last."""

    def __init__(self, kind: _Type, index: int, item_id: str, fields: Mapping[str, Any]) -> None:
        self.kind = kind
        self.document: dict[str, Any] = {
            "type": kind.name,
            "id": f"{kind.prefix}_{item_id}",
            "status": "in_progress",
            kind.field: [] if kind.field == "content" else "",
            **fields,
        }
        self._place = {"item_id": self.document["id"], "output_index": index}
        if kind.field == "content":
            self._place["content_index"] = 0
        self._texts: list[str] = []
        self._logprobs: list[ChosenTokenLogprob] = []
        self._input = InputText()

    def begin(self) -> list[Event]:
        added = self._whole("added")
        if self.kind.field != "content":
            return [added]
        return [added, self._event("content_part.added", part=self._part("", []))]

    def add(self, text: str, logprobs: list[ChosenTokenLogprob]) -> list[Event]:
        """Add what the model writes next. `logprobs`: of a message."""
        if self.kind is _CUSTOM_CALL:
            text = self._input.feed(text)
        if not text:
            return []
        self._texts.append(text)
        self._logprobs += logprobs
        scores = {"logprobs": logprobs} if self.kind is _MESSAGE else {}
        return [self._event(f"{self.kind.events}.delta", delta=text, **scores)]

    def finish(self, status: Literal["completed", "incomplete"], seal: Seal | None) -> list[Event]:
        text, done, field = "".join(self._texts), f"{self.kind.events}.done", self.kind.field
        self.document["status"] = status
        if field != "content":
            self.document[field] = text
            return [self._event(done, **{field: text}), self._whole("done")]
        part = self._part(text, self._logprobs)
        self.document["content"] = [part]
        if self.kind is _THOUGHT and seal is not None:
            self.document["encrypted_content"] = seal(text)
        written = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            self._event(done, **written),
            self._event("content_part.done", part=part),
            self._whole("done"),
        ]

    def _part(self, text: str, logprobs: list[ChosenTokenLogprob]) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.kind.events, "text": text}
        return part | {"annotations": [], "logprobs": logprobs} if self.kind is _MESSAGE else part

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"response.{name}", **self._place, **fields}

    def _whole(self, state: str) -> Event:
        # Copied: the document goes on changing.
        item, index = {**self.document}, self._place["output_index"]
        return {"type": f"response.output_item.{state}", "output_index": index, "item": item}


class OutputItems:
    """The output of one response. `names`: what the client calls the tools. `seal`: seals thought, if it is asked for.

    Methods return the events that a step causes.
    """

    def __init__(self, response_id: str, names: Mapping[str, ToolName], seal: Seal | None) -> None:
        self._id = response_id.partition("_")[2]
        self._names = names
        self._seal = seal
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._unsent: list[ChosenTokenLogprob] = []

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The items that have ended."""
        return [item.document for item in self._items if item is not self._open]

    def add(self, deltas: list[OutputDelta], logprobs: list[ChosenTokenLogprob] | None = None) -> list[Event]:
        """Add what one event of the engine completes. Tokens of thought and calls have no log-probabilities in a response."""
        self._unsent += logprobs or ()
        return [event for delta in deltas for event in self._add(delta)]

    def finish(self, status: Literal["completed", "incomplete"], *, stopped: bool) -> list[Event]:
        """End the last item. `stopped`: the model ended its answer, which has a message even if it is empty."""
        events: list[Event] = []
        if stopped and all(item.kind is _THOUGHT for item in self._items):
            events = self._begin(_MESSAGE, {"role": "assistant"})
        return events + self._close(status)

    def _add(self, delta: OutputDelta) -> list[Event]:
        if isinstance(delta, ToolCallStart):
            name = self._names.get(delta.name) or ToolName("function", delta.name)
            fields = {"call_id": delta.call_id, "name": name.name}
            if name.namespace is not None:
                fields["namespace"] = name.namespace
            return self._begin(_CUSTOM_CALL if name.kind == "custom" else _CALL, fields)
        item, events, logprobs = self._open, list[Event](), self._take_logprobs(delta.text)
        if isinstance(delta, ContentDelta):
            if item is None or item.kind is not _MESSAGE:
                events = self._begin(_MESSAGE, {"role": "assistant"})
        elif isinstance(delta, ReasoningDelta) and item is None:
            events = self._begin(_THOUGHT, {"summary": []})
        return events + self._items[-1].add(delta.text, logprobs)

    def _take_logprobs(self, text: str) -> list[ChosenTokenLogprob]:
        """Take those of the tokens that wrote `text`, and forget those before it, which wrote markers."""
        if not text or not self._unsent:
            return []
        tokens, wanted = [bytes(each["bytes"]) for each in self._unsent], text.encode()
        ends, begin = [*accumulate(map(len, tokens))], b"".join(tokens).rfind(wanted)
        # Text that the parser has written anew is not found: then all tokens are its own.
        end = ends[-1] if begin < 0 else begin + len(wanted)
        last = next(index for index, each in enumerate(ends) if each >= end)
        taken = [each for each, at in zip(self._unsent[: last + 1], ends, strict=False) if at > begin]
        self._unsent = self._unsent[last + 1 :]
        return taken

    def _begin(self, kind: _Type, fields: Mapping[str, Any]) -> list[Event]:
        events = self._close("completed")
        index = len(self._items)
        self._open = _Item(kind, index, f"{self._id}{index:04x}", fields)
        self._items.append(self._open)
        return events + self._open.begin()

    def _close(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        item, self._open = self._open, None
        return [] if item is None else item.finish(status, self._seal)
