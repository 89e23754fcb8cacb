"""What an engine did for one request, counted from the engine's own events.

Invariant: a token counts once the engine has told of it, whether anybody reads the answer or not.
"""

from collections.abc import Sequence

from loraplex.engine.messages import Delta, Event, Finished, Started


class TokenMeter:
    """Counts the events of one engine request per prompt; a prompt counts from its `Started` on."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self._prompt_tokens = tuple(prompt_tokens)
        self._cached: dict[int, int] = {}
        self._generated: dict[tuple[int, int], int] = {}
        self.finished = 0
        """Choices that came to their own end."""

    def see(self, prompt: int, event: Event) -> None:
        """Count an event of the request for `prompt`."""
        match event:
            case Started(cached_tokens=cached):
                self._cached[prompt] = min(cached, self._prompt_tokens[prompt])
            case Delta(choice=choice, token_ids=token_ids):
                key = (prompt, choice)
                self._generated[key] = self._generated.get(key, 0) + len(token_ids)
            case Finished(choice=choice, usage=usage):
                key = (prompt, choice)
                self._generated[key] = max(self._generated.get(key, 0), usage.completion_tokens)
                self.finished += event.reason != "abort"

    @property
    def prompt_tokens(self) -> int:
        """Of the prompts that the engine computed, the cached part included."""
        return sum(self._prompt_tokens[prompt] for prompt in self._cached)

    @property
    def cached_tokens(self) -> int:
        """Of `prompt_tokens`, those that the engine knew already."""
        return sum(self._cached.values())

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(self._generated.values())
