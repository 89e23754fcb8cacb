"""Remembers the adapters and grammars that were in use when engines died, and refuses them for a while after a second death.

Invariant: an entry counts for its own tenant only. One request that finishes normally clears the entries of its adapter and
grammar.
"""

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from loraplex.engine.errors import AdapterQuarantined
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.grammar.errors import GrammarTooCostly

Kind: TypeAlias = Literal["adapter", "grammar"]
Fingerprint: TypeAlias = tuple[Kind, str]
Work: TypeAlias = EngineRequest | AdapterRef
"""A request, or an adapter that is probed."""
KINDS: Final[tuple[Kind, ...]] = ("adapter", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonPolicy:
    """A suspect is forgotten `suspect_s` after its last death. From `deaths` on it is refused.

    The refusal lasts `refusal_s` and doubles with each further death, up to `max_refusal_s`: others' adapters may have been
    in use at both deaths by chance, and are cleared by their next request. Beyond a bound, the oldest entry of the tenant with
    the most is dropped.
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
        self.entries = 0
        self.refusals: Counter[Kind] = Counter()

    def record_death(self, open_work: Iterable[Work]) -> None:
        """Suspect what was used by this work, which was open when its engine died."""
        now = self._clock()
        self._drop_expired(now)
        used = {(work.namespace, each) for work in open_work for each in _fingerprints(work)}
        for namespace, fingerprint in sorted(used):
            self._suspect(namespace, fingerprint, now)

    def record_finished(self, ended: Iterable[Work]) -> None:
        """Clear what was used by this work, which ended normally."""
        for work in ended:
            suspects = self._tenants.get(work.namespace)
            if suspects is None:
                continue
            for fingerprint in _fingerprints(work):
                if suspects.pop(fingerprint, None) is not None:
                    self.entries -= 1
            if not suspects:
                del self._tenants[work.namespace]

    def check(self, request: EngineRequest, grammar_param: str | None) -> None:
        """Raise `AdapterQuarantined` or `GrammarTooCostly`, naming `grammar_param`, for what its tenant may not use now."""
        refused = self.refusal(request)
        if refused is None:
            return
        kind, message = refused
        if kind == "adapter":
            raise AdapterQuarantined(message)
        raise GrammarTooCostly(message, param=grammar_param)

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
        lasts_s = min(policy.refusal_s * 2.0 ** (suspect.deaths - policy.deaths), policy.max_refusal_s)
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
        suspects = self._tenants[namespace]
        suspects.popitem(last=False)
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


def _fingerprints(work: Work) -> Iterator[Fingerprint]:
    adapter = work if isinstance(work, AdapterRef) else work.adapter
    if adapter is not None:
        yield "adapter", adapter.digest
    if isinstance(work, EngineRequest) and work.grammar is not None:
        yield "grammar", hashlib.blake2b(work.grammar, digest_size=32).hexdigest()
