"""`MaskCompiler`: compiles a `GrammarSpec` to a token mask at the grammar's start; the engine's `TokenMaskFactory`.

Invariant: one build per key runs at a time and is cached per tenant (`tenant_cache.py`). A tenant's grammars neither
evict nor speed up another tenant's. A cached grammar counts with what it has grown to.
"""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeAlias, TypeVar, cast

import msgspec

from loraplex.grammar.backends.escaped_vocabulary import EscapedVocabulary
from loraplex.grammar.backends.forced_close import CloseFinder
from loraplex.grammar.backends.grammar_memory import GrammarMemory
from loraplex.grammar.backends.held_input_mask import HeldInputMask, InputTokens
from loraplex.grammar.backends.llguidance_mask import (
    CompiledLlguidance,
    LlguidanceCompiler,
    LlguidanceLimits,
    LlguidanceMask,
)
from loraplex.grammar.backends.replayed_mask import AnswerMask, AnyTextMask
from loraplex.grammar.backends.thought_mask import MarkerTokens, ThoughtMask
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.backends.xgrammar_mask import CompiledXgrammar, XgrammarCompiler, XgrammarMask
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.spec import GrammarSpec, Thought, decode_spec
from loraplex.grammar.tenant_cache import TenantCache
from loraplex.grammar.thought import KNOWN, ThoughtMarkers

Compiled: TypeAlias = CompiledLlguidance | CompiledXgrammar | MarkerTokens
EVERYBODY: Final = b"everybody"


class Sized(Protocol):
    @property
    def size_bytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class CompiledCache(Generic[Value]):
    """At most `max_bytes` for all tenants, `max_tenant_bytes` for one. Safe to use from several threads.

    A value that is no longer `is_current` is built again by the next `get`.
    """

    def __init__(
        self, max_bytes: int, max_tenant_bytes: int, is_current: Callable[[Value], bool] = lambda _: True
    ) -> None:
        self._is_current = is_current
        self._lock = threading.Lock()
        self._kept: TenantCache[Value] = TenantCache(max_bytes, max_tenant_bytes, attrgetter("size_bytes"))
        self._builds: dict[tuple[bytes, Hashable], Future[Value]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tenants' entries."""
        return self._kept.size_bytes

    def peek(self, namespace: bytes, key: Hashable) -> Value | None:
        """Return the cached value of `key` or None; never wait for a build."""
        with self._lock:
            return self._kept.get(namespace, key)

    def get(self, namespace: bytes, key: Hashable, build: Callable[[], Value]) -> Value:
        """Return the value of `key`, built once even for concurrent threads. Each of them gets the error of `build`."""
        with self._lock:
            known = self._kept.get(namespace, key)
            if known is not None and self._is_current(known):
                return known
            running = self._builds.get((namespace, key))
            future = running or self._builds.setdefault((namespace, key), Future())
        return future.result() if running else self._build(namespace, key, build, future)

    def reweigh(self, namespace: bytes, key: Hashable) -> None:
        """Count the present size of an entry that has grown."""
        with self._lock:
            self._kept.reweigh(namespace, key)

    def _build(
        self, namespace: bytes, key: Hashable, build: Callable[[], Value], future: "Future[Value]"
    ) -> Value:
        try:
            value = build()
        except BaseException as error:
            with self._lock:
                del self._builds[namespace, key]
            future.set_exception(error)
            raise
        with self._lock:
            self._kept.put(namespace, key, value)
            del self._builds[namespace, key]
        future.set_result(value)
        return value


@dataclass(frozen=True, slots=True)
class CompilerConfig:
    """Bytes of compiled grammars, and llguidance's work limits.

    The bytes bound cached grammars. Those of live rows are rebuilt when all of a tenant's grammars are above its bytes.
    """

    cache_bytes: int = 512 * 2**20
    tenant_cache_bytes: int = 64 * 2**20
    llguidance: LlguidanceLimits = field(default_factory=LlguidanceLimits)


@dataclass(frozen=True, slots=True)
class _Backends:
    """Both libraries' form of the vocabulary."""

    llguidance: LlguidanceCompiler
    xgrammar: XgrammarCompiler
    closer: CloseFinder


@dataclass(frozen=True, slots=True)
class _TenantGrammar:
    """One llguidance grammar of one tenant: the `GrammarOwner` of its builds. `kind`: of its vocabulary, in the cache."""

    namespace: bytes
    source: str
    compiler: LlguidanceCompiler
    kind: str
    cache: CompiledCache[Compiled]
    memory: GrammarMemory

    def build(self) -> CompiledLlguidance:
        compiled = self.compiler.compile(self.source, self)
        self.memory.add(self.namespace, compiled)
        return compiled

    def exceeds_share(self, compiled: CompiledLlguidance, added_bytes: int) -> bool:
        self.cache.reweigh(self.namespace, self._key)
        return self.memory.exceeds_share(self.namespace, compiled, added_bytes)

    def rebuilt(self) -> CompiledLlguidance:
        # The key names the backend, so what is cached for it is this kind.
        return cast("CompiledLlguidance", self.cache.get(self.namespace, self._key, self.build))

    @property
    def _key(self) -> Hashable:
        return self.kind, self.source


class MaskCompiler:
    """Compiles for one vocabulary. Safe to use from several threads; each call may be slow and belongs on a side
    thread.
    """

    def __init__(self, vocabulary: Vocabulary, limits: CompilerConfig | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or CompilerConfig()
        self._lock = threading.Lock()
        self._backends: _Backends | None = None
        sizes = self._limits.cache_bytes, self._limits.tenant_cache_bytes
        self._memory = GrammarMemory(*sizes)
        self._cache: CompiledCache[Compiled] = CompiledCache(
            *sizes, lambda compiled: not compiled.is_outgrown
        )

    def warm_up(self) -> None:
        """Build what every grammar needs before the first request: seconds for 128k tokens."""
        self._ready()

    def compile(self, namespace: bytes, data: bytes) -> AnswerMask:
        """Return a mask at the grammar's start. Raises `GrammarInvalid`, also for bytes that are no spec."""
        try:
            spec = decode_spec(data)
        except msgspec.DecodeError as error:
            raise GrammarInvalid(f"not a grammar spec: {error}") from error
        answer: AnswerMask = AnyTextMask(self._vocabulary.vocab_size)
        if spec.source:
            answer = self._answer(namespace, spec)
        if spec.inputs:
            tokens, escaped = self._escaped
            inputs = [
                (each.head.encode(), self._input(namespace, each.source, escaped)) for each in spec.inputs
            ]
            answer = HeldInputMask(answer, inputs, tokens)
        if spec.thought is None:
            return answer
        return ThoughtMask(spec.thought, self._markers(namespace, spec.thought), answer)

    def _markers(self, namespace: bytes, thought: Thought) -> MarkerTokens:
        """Return the tokens around markers: those of widely used ones for all tenants, others for each tenant."""
        start, end = thought.start, thought.end
        owner = EVERYBODY if ThoughtMarkers(start, end) in KNOWN else namespace
        built = self._cache.get(owner, (start, end), lambda: MarkerTokens(self._vocabulary, start, end))
        return cast("MarkerTokens", built)

    @cached_property
    def _escaped(self) -> tuple[InputTokens, LlguidanceCompiler]:
        """What inputs of custom tools need: seconds for 128k tokens, at the first of them."""
        vocabulary = EscapedVocabulary(self._vocabulary)
        return InputTokens(vocabulary), LlguidanceCompiler(vocabulary, self._limits.llguidance)

    def _input(
        self, namespace: bytes, source: str, compiler: LlguidanceCompiler
    ) -> Callable[[], LlguidanceMask]:
        """Return what makes the mask of an input's grammar."""
        compiled, closer = self._llguidance(namespace, source, compiler, "input"), self._ready().closer
        return lambda: compiled.mask(closer, fast_forward=False, closes=False)

    def _answer(self, namespace: bytes, spec: GrammarSpec) -> LlguidanceMask | XgrammarMask:
        backends, source = self._ready(), spec.source
        compiled: CompiledLlguidance | CompiledXgrammar
        if spec.backend == "llguidance":
            compiled = self._llguidance(namespace, source, backends.llguidance, spec.backend)
        else:
            built = self._cache.get(
                namespace, (spec.backend, source), lambda: backends.xgrammar.compile(source)
            )
            compiled = cast("CompiledXgrammar", built)
        return compiled.mask(backends.closer, fast_forward=spec.fast_forward, closes=spec.close)

    def _llguidance(
        self, namespace: bytes, source: str, compiler: LlguidanceCompiler, kind: str
    ) -> CompiledLlguidance:
        grammar = _TenantGrammar(namespace, source, compiler, kind, self._cache, self._memory)
        return grammar.rebuilt()

    def _ready(self) -> _Backends:
        with self._lock:
            if self._backends is None:
                llguidance = LlguidanceCompiler(self._vocabulary, self._limits.llguidance)
                xgrammar = XgrammarCompiler(self._vocabulary, llguidance.tokenizer)
                self._backends = _Backends(llguidance, xgrammar, CloseFinder(self._vocabulary))
            return self._backends
