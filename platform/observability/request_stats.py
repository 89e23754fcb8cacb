"""Tokens and timings of one request, counted from the engine's own events; moments in seconds on one monotonic clock.

Invariants: a token counts once, when the engine has reported it, whether or not a client reads the response. The response's
`usage`, the metrics and the settlement read the same numbers. Phases follow each other and add up to the duration.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loraplex.engine.messages import NO_CAUSES, Delta, Event, Failed, Finished, Started, Usage, WaitCauses
from loraplex.tenants.ledger.histograms import EMPTY, GAP_BOUNDS_MS, counted
from loraplex.tenants.quotas.reservation import PhaseCauses, RequestTimings


class ThoughtCount(Protocol):
    """Counts the tokens of one choice that are thought."""

    def count(self, token_ids: Iterable[int]) -> int: ...

    def rest(self, missing: int) -> int: ...


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Statistics of a request, filled while it runs: one engine request per prompt, `n` choices each.

    `prompt_lengths`: the tokens of each prompt; from `num_prompts` on, if given, those that a row adds which is scored behind
    another. `cacheable`: of a prompt, the tokens at its beginning that count as cached. `submitted`: when
    the engine got them; `started`: when it reported `queue_s`, as the gateway's `clock` has it. `queue_s` and `prefill_s` are the
    engine's: the longest of the prompts; `grammar_s` and `adapter_s` are parts of `queue_s`.
    `first_token` and `last_token` are None when none was delivered; `token_gaps` are the times between successive delivered
    tokens of one choice, `gap_buckets` what `timings` counted of them. `finish_reason` is the engine's, or `error`, or `abort` when the client disconnected.
    `finished_choices` ended without being aborted. `prompt_tokens`: those that the engine computed or found in its cache, a
    prompt once for all its choices; `cached_tokens` the part of them in the prefix cache; `completion_tokens` those of all
    choices, `reasoning_tokens` the part of them that is thought, where `thought_counter` makes what counts it for a choice.
    `gateway_phases`: begin and end of what the gateway did, by name, and `gateway_causes` what it waited for in them; `causes`: those
    of the engine's waits. `system_fingerprint`: the engine's. `engine`: which one, as metrics label it. `resumed`: how often another
    engine went on with it.
    """

    arrival: float
    n: int
    max_tokens: int
    prompt_lengths: Sequence[int]
    num_prompts: int | None = None
    cacheable: int = sys.maxsize
    thought_counter: Callable[[], ThoughtCount] | None = None
    submitted: float | None = None
    started: float | None = None
    clock: Callable[[], float] = time.monotonic
    finished_choices: int = 0
    prompt_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    completion_tokens: int = field(default=0, init=False)
    reasoning_tokens: int = field(default=0, init=False)
    finish_reason: str = "abort"
    queue_s: float | None = None
    prefill_s: float | None = None
    grammar_s: float = 0.0
    adapter_s: float = 0.0
    causes: WaitCauses = NO_CAUSES
    system_fingerprint: str | None = None
    resumed: int = 0
    engine: str | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float = 0.0
    token_gaps: list[float] = field(default_factory=list)
    gap_buckets: Sequence[int] = field(default=EMPTY, init=False)
    gateway_phases: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    gateway_causes: Mapping[str, PhaseCauses] = field(default_factory=dict)
    _prompts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _generated: dict[tuple[int, int], int] = field(default_factory=dict)
    _delivered: dict[int, float] = field(default_factory=dict)
    _thoughts: dict[int, ThoughtCount] = field(default_factory=dict)

    @property
    def largest_choice(self) -> int:
        """Generated tokens of the longest choice."""
        return max(self._generated.values(), default=0)

    def prompt_usage(self, prompt: int) -> tuple[int, int]:
        """Return (tokens of one prompt, those of them in the prefix cache); none of these before the engine has begun it."""
        return self.prompt_lengths[prompt], self._prompts.get(prompt, (0, 0))[1]

    def see(self, prompt: int, event: Event) -> None:
        """Count an event of the engine request for `prompt`.

        A prompt counts from its `Started` on; one that ends before counts as far as it was computed.
        """
        match event:
            case Started():
                self.system_fingerprint, self.engine = event.system_fingerprint, event.engine
                self._count_prompt(prompt, self.prompt_lengths[prompt], event.cached_tokens)
                if self.queue_s is None or event.queue_s > self.queue_s:
                    self.queue_s, self.started = event.queue_s, self.clock()
                    self.grammar_s, self.adapter_s = event.grammar_s, event.adapter_s
                    self.causes = event.causes
                self.prefill_s = max(self.prefill_s or 0.0, event.prefill_s)
            case Delta(choice=choice, token_ids=token_ids):
                self._count_generated((prompt, choice), len(token_ids))
                if self.thought_counter is not None:
                    self.reasoning_tokens += self._thought_of(choice).count(token_ids)
            case Finished(choice=choice, usage=usage):
                self._count_usage(prompt, choice, usage)
                if event.reason != "abort":
                    self.finished_choices += 1
                    if usage.completion_tokens or self.finish_reason == "abort":
                        self.finish_reason = event.reason
            case Failed():
                for choice, usage in event.usage.items():
                    self._count_usage(prompt, choice, usage)

    def deliver(self, choice: int, tokens: int, now: float) -> None:
        """Time the delivery of a choice's next `tokens` tokens; choices count through all prompts."""
        last = self._delivered.get(choice)
        if self.first_token is None:
            self.first_token = now
        if last is not None and tokens:
            self.token_gaps.extend([(now - last) / tokens] * tokens)
        self._delivered[choice] = self.last_token = now

    def timings(self) -> RequestTimings:
        """The times of the ended request as the ledger has them. A phase that took no time is left out. The duration counts from
        the authentication, if there was one; the first token counts from the arrival, when the body was read.
        """
        first, origin = self.first_token, self._origin
        self.gap_buckets = counted(GAP_BOUNDS_MS, (gap * 1000 for gap in self.token_gaps))
        phases = {
            # Of rounded moments, so that rounded durations add up, too.
            name: (start := _milliseconds(began - origin), _milliseconds(ended - origin) - start)
            for name, began, ended in self.phases()
        }
        return RequestTimings(
            ttft_ms=None if first is None else _milliseconds(first - self.arrival),
            duration_ms=_milliseconds(self.finished - origin),
            phases=phases,
            causes={name: causes for name, causes in self.phase_causes() if name in phases},
            gap_buckets=self.gap_buckets,
        )

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Name, begin and end of each phase that took time. Each begins where the one before it ends."""
        began = self._origin
        for name, until in self._ends():
            ended = min(until, self.finished)
            if ended > began:
                yield name, began, ended
                began = ended

    @property
    def _origin(self) -> float:
        """When the authentication began, or the arrival of a request without one."""
        return self.gateway_phases.get("auth", (self.arrival,))[0]

    def _ends(self) -> Iterator[tuple[str, float]]:
        """Every phase in its order, and when it ended: before an earlier one did, where it took no time or was left out.

        The engine's own times are laid out backwards from its report: `transport` is the way to the engine and back.
        """
        done = defaultdict(lambda: (0.0, 0.0), self.gateway_phases)
        yield "auth", done["auth"][1]
        yield "body", self.arrival
        yield "prepare", done["admission"][0]
        for name in ("admission", "adapter_fetch", "schema_check"):
            yield name, done[name][1]
        if self.started is None or self.queue_s is None or self.prefill_s is None:
            yield "transport", self.submitted or 0.0
            yield "engine", self.finished
            return
        at = self.started - self.queue_s - self.prefill_s
        yield "transport", at
        for name, seconds in (
            ("grammar_compile", self.grammar_s),
            ("adapter_load", self.adapter_s),
            ("queue", self.queue_s - self.grammar_s - self.adapter_s),
            ("prefill", self.prefill_s),
        ):
            at += seconds
            yield name, at
        yield "journal", done["journal"][1]
        yield "delivery", self.first_token or 0.0
        yield "decode", self.last_token or 0.0
        yield "finish", self.finished

    def phase_causes(self) -> Iterator[tuple[str, PhaseCauses]]:
        """Name and causes of each phase that has any: what it waited for or did."""
        causes = self.causes
        yield from self.gateway_causes.items()
        yield (
            "grammar_compile",
            _given(before=causes.grammars_before, compile_ms=_milliseconds(causes.compile_s)),
        )
        yield (
            "adapter_load",
            _given(tier=causes.adapter_tier, bytes=causes.adapter_bytes, loads_before=causes.loads_before),
        )
        yield (
            "queue",
            _given(before=causes.queued_before, overtaken_by=causes.overtaken_by, limit=causes.limit),
        )
        yield "prefill", {"computed": self.prompt_tokens - self.cached_tokens, "cached": self.cached_tokens}

    def _count_usage(self, prompt: int, choice: int, usage: Usage) -> None:
        key = (prompt, choice)
        missing = max(0, usage.completion_tokens - self._generated.get(key, 0))
        self._count_generated(key, missing)
        if self.thought_counter is not None:
            self.reasoning_tokens += self._thought_of(choice).rest(missing)
        self._count_prompt(prompt, usage.prompt_tokens, usage.cached_tokens)

    def _thought_of(self, choice: int) -> "ThoughtCount":
        if choice not in self._thoughts and self.thought_counter is not None:
            self._thoughts[choice] = self.thought_counter()
        return self._thoughts[choice]

    def _count_prompt(self, prompt: int, tokens: int, cached: int) -> None:
        """Count a prompt once for all its choices: as far as the most advanced one."""
        tokens = min(tokens, self.prompt_lengths[prompt])
        before, cached_before = self._prompts.get(prompt, (0, 0))
        if tokens > before:
            is_scored = self.num_prompts is not None and prompt >= self.num_prompts
            cached = 0 if is_scored else min(cached, tokens, self.cacheable)
            self._prompts[prompt] = tokens, cached
            self.prompt_tokens += tokens - before
            self.cached_tokens += cached - cached_before

    def _count_generated(self, key: tuple[int, int], tokens: int) -> None:
        """Count further tokens of the choice (prompt, choice)."""
        self._generated[key] = self._generated.get(key, 0) + tokens
        self.completion_tokens += tokens


def _given(**causes: int | str | None) -> PhaseCauses:
    """Those causes that say something."""
    return {name: value for name, value in causes.items() if value}


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


class RequestRecorder(Protocol):
    """Receives every request that reached the engine, once, and before it the name by which it asks for an adapter."""

    def record(self, stats: RequestStats) -> None: ...

    def record_adapter(self, digest: str, name: str) -> None: ...

    def record_decision(self, questions: Mapping[str, int], seconds: float) -> None:
        """Record a decision that was answered: its questions by type, and how long they took."""
        ...
