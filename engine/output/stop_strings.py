"""Finds stop strings in a stream of text (Aho and Corasick 1975) across any division of the text, and never sends half of
one.

Invariant: the text sent and the stop found depend on the text alone, not on its division. The stop completed by the
earliest character wins; of several completed by the same character the longest does.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    """A prefix of some stop string. `undecided`: length of its longest suffix that more text may extend to a stop."""

    undecided: int = 0
    match: str | None = None
    fallback: "_State | None" = None
    following: "dict[str, _State]" = field(default_factory=dict)

    def step(self, character: str) -> "_State":
        """The state of the longest suffix that is a prefix of a stop string."""
        state = self
        while True:
            following = state.following.get(character)
            if following is not None:
                return following
            if state.fallback is None:
                return state
            state = state.fallback


class StopStrings:
    """The compiled stop strings of one request, shared by its choices. Costs one state per character."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.start = _State()
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string is empty")
        state = self.start
        for character in stop:
            state = state.following.setdefault(character, _State())
        state.match = stop

    def _link(self) -> None:
        """Set fallbacks, inherited matches and `undecided`, shortest prefixes first."""
        waiting = deque((state, self.start, 1) for state in self.start.following.values())
        while waiting:
            state, fallback, length = waiting.popleft()
            state.fallback = fallback
            state.match = state.match or fallback.match
            state.undecided = length if state.following else fallback.undecided
            for character, following in state.following.items():
                waiting.append((following, fallback.step(character), length + 1))


class ThoughtPassage:
    """Finds where the thought at the beginning of a text ends. `start` empty: the text begins inside it."""

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, end
        self._held = ""
        self._tail = ""
        self._is_inside: bool | None = None if start else True

    def split(self, text: str) -> tuple[str, str]:
        """Return the next text of the thought, and what follows it. The start is held back until it is complete."""
        if self._is_inside is None:
            self._held += text
            if self._start.startswith(self._held) and self._held != self._start:
                return "", ""
            self._is_inside = self._held.startswith(self._start)
            text = self.flush()
        if not self._is_inside:
            return "", text
        searched = self._tail + text
        found = searched.find(self._end)
        if found < 0:
            self._tail = searched[-len(self._end) :]
            return text, ""
        self._is_inside = False
        behind = found + len(self._end) - len(self._tail)
        return text[:behind], text[behind:]

    def flush(self) -> str:
        """Return the text that is held back."""
        held, self._held = self._held, ""
        return held


class StopMatcher:
    """Watches the text of one choice. With `include_stop` the stop string stays in the text, so nothing is withheld.

    `thought`: a text that comes first, in which stop strings are ordinary text.
    """

    def __init__(
        self, stops: StopStrings, include_stop: bool = False, thought: ThoughtPassage | None = None
    ) -> None:
        self._state = stops.start
        self._include_stop = include_stop
        self._thought = thought
        self._pending = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the stop string that `text` completed, if any; text after it is
        dropped.

        With `may_stop` false, stop strings that end in `text` are ordinary text.
        """
        thought, text = ("", text) if self._thought is None else self._thought.split(text)
        visible, stop = self._push(text, may_stop)
        return thought + visible, stop

    def _push(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        state, pending = self._state, self._pending + text
        for end, character in enumerate(text, start=len(self._pending) + 1):
            state = state.step(character)
            if may_stop and state.match is not None:
                self._pending = ""
                return pending[: end if self._include_stop else end - len(state.match)], state.match
        self._state = state
        safe = len(pending) - (0 if self._include_stop else state.undecided)
        self._pending = pending[safe:]
        return pending[:safe], None

    def flush(self) -> str:
        """Return the withheld text, once no more can come."""
        rest, self._pending = self._pending, ""
        return rest if self._thought is None else rest + self._thought.flush()
