"""Remembers what was in use when engines died: adapters, grammars, and prompts without either. After a second death it refuses
them for a while.

Invariants: an entry counts for its own tenant only. No client request causes two counted deaths. A request that finishes
normally takes back one death of what it used.
"""

import hashlib
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from loraplex.engine.errors import AdapterQuarantined, PromptQuarantined
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.grammar.errors import GrammarTooCostly

Kind: TypeAlias = Literal["adapter", "grammar", "prompt"]
Fingerprint: TypeAlias = tuple[Kind, str]
Work: TypeAlias = EngineRequest | AdapterRef
"""A request, or an adapter that is probed."""
KINDS: Final[tuple[Kind, ...]] = ("adapter", "grammar", "prompt")
REMEMBERED_DEATHS: Final = 16
"""Counted deaths whose requests are known: a request that is resumed may be open at another one soon."""
MAX_DOUBLINGS: Final = 64
"""Bound of an exponent, far beyond the longest refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonPolicy:
    """A suspect is forgotten `suspect_s` after its last death. From `deaths` on it is refused.

    The refusal lasts `refusal_s` and doubles with each further death, up to `max_refusal_s`: others' adapters may have been
    in use at both deaths by chance. Beyond a bound, the oldest entry of the tenant with the most is dropped.
    """

    deaths: int = 2
    refusal_s: float = 60.0
    max_refusal_s: float = 900.0
    suspect_s: float = 3600.0
    max_entries: int = 16_384
    max_tenant_entries: int = 256


@dataclass(slots=True)
class _Suspect:
    """What was in use at `deaths` deaths, the last one at `at`."""

    deaths: int
    at: float


class PoisonMemory:
    """The suspects of one gateway. `refusals` counts refused requests by kind. Times are those of `clock`, in seconds."""

    def __init__(
        self, policy: PoisonPolicy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy or PoisonPolicy()
        self._clock = clock
        self._tenants: dict[bytes, OrderedDict[Fingerprint, _Suspect]] = {}
        self._deaths: deque[frozenset[str]] = deque(maxlen=REMEMBERED_DEATHS)
        self.entries = 0
        self.refusals: Counter[Kind] = Counter()

    def record_death(self, open_work: Collection[Work]) -> None:
        """Suspect what was used by this work, which was open when its engine died.

        A death with a request that was open at a counted one before is not counted, for any tenant: a request that is
        submitted once more may cause both, and everything that is submitted again beside it would be open at both.
        """
        now = self._clock()
        self._drop_expired(now)
        requests = frozenset(work.request_id for work in open_work if isinstance(work, EngineRequest))
        if any(requests & earlier for earlier in self._deaths):
            return
        self._deaths.append(requests)
        for namespace, fingerprint in sorted(_used(open_work)):
            self._suspect(namespace, fingerprint, now)

    def record_finished(self, ended: Collection[Work]) -> None:
        """Take back one death of what was used by this work, the whole of one client request, which ended normally."""
        if not self._tenants:
            return
        for namespace, fingerprint in _used(ended):
            suspects = self._tenants.get(namespace)
            suspect = None if suspects is None else suspects.get(fingerprint)
            if suspects is None or suspect is None:
                continue
            suspect.deaths -= 1
            if suspect.deaths == 0:
                del suspects[fingerprint]
                self.entries -= 1
            if not suspects:
                del self._tenants[namespace]

    def check(self, request: EngineRequest, grammar_param: str | None) -> None:
        """Raise `AdapterQuarantined`, `PromptQuarantined`, or `GrammarTooCostly` that names `grammar_param`, for what its tenant may
        not use now.
        """
        refused = self.refusal(request)
        if refused is None:
            return
        kind, message = refused
        if kind == "adapter":
            raise AdapterQuarantined(message)
        if kind == "prompt":
            raise PromptQuarantined(message)
        raise GrammarTooCostly(message, param=grammar_param)

    def refuses(self, work: Work) -> bool:
        """Whether its tenant may not use something of `work` now."""
        return self.refusal(work) is not None

    def refusal(self, work: Work) -> tuple[Kind, str] | None:
        """Return what of `work` its tenant may not use now, and why, and count the refusal; None when it may run."""
        suspects = self._tenants.get(work.namespace)
        if suspects is None:
            return None
        for kind, digest in _fingerprints(work):
            seconds = self._refused_s(suspects.get((kind, digest)))
            if seconds > 0:
                self.refusals[kind] += 1
                return kind, f"engines ended while they ran this {kind}; it is refused for {seconds:.0f} s"
        return None

    def _refused_s(self, suspect: _Suspect | None) -> float:
        policy = self._policy
        if suspect is None or suspect.deaths < policy.deaths:
            return 0.0
        doublings = min(suspect.deaths - policy.deaths, MAX_DOUBLINGS)
        lasts_s = min(policy.refusal_s * 2.0**doublings, policy.max_refusal_s)
        return suspect.at + lasts_s - self._clock()

    def _suspect(self, namespace: bytes, fingerprint: Fingerprint, now: float) -> None:
        suspects = self._tenants.setdefault(namespace, OrderedDict())
        known = suspects.pop(fingerprint, None)
        suspects[fingerprint] = _Suspect(1 if known is None else known.deaths + 1, now)
        self.entries += known is None
        if len(suspects) > self._policy.max_tenant_entries:
            self._drop_oldest(namespace)
        while self.entries > self._policy.max_entries:
            self._drop_oldest(max(self._tenants, key=lambda each: len(self._tenants[each])))

    def _drop_oldest(self, namespace: bytes) -> None:
        """Drop the oldest prompt, of which a tenant may have any number open, or else the oldest entry."""
        suspects = self._tenants[namespace]
        del suspects[next((each for each in suspects if each[0] == "prompt"), next(iter(suspects)))]
        self.entries -= 1
        if not suspects:
            del self._tenants[namespace]

    def _drop_expired(self, now: float) -> None:
        """The entries of a tenant are in the order of their last deaths."""
        for namespace, suspects in list(self._tenants.items()):
            while suspects and next(iter(suspects.values())).at + self._policy.suspect_s <= now:
                suspects.popitem(last=False)
                self.entries -= 1
            if not suspects:
                del self._tenants[namespace]


def _used(works: Collection[Work]) -> set[tuple[bytes, Fingerprint]]:
    return {(work.namespace, each) for work in works for each in _fingerprints(work)}


def _fingerprints(work: Work) -> Iterator[Fingerprint]:
    adapter = work if isinstance(work, AdapterRef) else work.adapter
    if adapter is not None:
        yield "adapter", adapter.digest
    if not isinstance(work, EngineRequest):
        return
    if work.grammar is not None:
        yield "grammar", _digest(work.grammar)
    elif adapter is None:
        yield "prompt", _digest(array("I", work.prompt_token_ids).tobytes())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
