"""`MaskCompiler`: compiles a `GrammarSpec` to a token mask at the grammar's start; the engine's `TokenMaskFactory`.

Invariant: one build per key runs at a time and is cached per tenant (`tenant_cache.py`). A tenant's grammars neither
evict nor speed up another tenant's.
"""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import msgspec

from loraplex.grammar.backends.forced_close import CloseFinder
from loraplex.grammar.backends.llguidance_mask import (
    CompiledLlguidance,
    LlguidanceCompiler,
    LlguidanceLimits,
    LlguidanceMask,
)
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.backends.xgrammar_mask import CompiledXgrammar, XgrammarCompiler, XgrammarMask
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.spec import GrammarSpec, decode_spec
from loraplex.grammar.tenant_cache import TenantCache


class Sized(Protocol):
    @property
    def size_bytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class CompiledCache(Generic[Value]):
    """At most `max_bytes` for all tenants, `max_tenant_bytes` for one. Safe to use from several threads."""

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
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
            if known is not None:
                return known
            running = self._builds.get((namespace, key))
            future = running or self._builds.setdefault((namespace, key), Future())
        return future.result() if running else self._build(namespace, key, build, future)

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
    """Bytes of compiled grammars in the cache, and llguidance's work limits."""

    cache_bytes: int = 512 * 2**20
    tenant_cache_bytes: int = 128 * 2**20
    llguidance: LlguidanceLimits = field(default_factory=LlguidanceLimits)


@dataclass(frozen=True, slots=True)
class _Backends:
    """Both libraries' form of the vocabulary."""

    llguidance: LlguidanceCompiler
    xgrammar: XgrammarCompiler
    closer: CloseFinder

    def compile(self, spec: GrammarSpec) -> CompiledLlguidance | CompiledXgrammar:
        compiler = self.llguidance if spec.backend == "llguidance" else self.xgrammar
        return compiler.compile(spec.source)


class MaskCompiler:
    """Compiles for one vocabulary. Safe to use from several threads; each call may be slow and belongs on a side
    thread.
    """

    def __init__(self, vocabulary: Vocabulary, limits: CompilerConfig | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or CompilerConfig()
        self._lock = threading.Lock()
        self._backends: _Backends | None = None
        self._cache: CompiledCache[CompiledLlguidance | CompiledXgrammar] = CompiledCache(
            self._limits.cache_bytes, self._limits.tenant_cache_bytes
        )

    def warm_up(self) -> None:
        """Build what every grammar needs before the first request: seconds for 128k tokens."""
        self._ready()

    def compile(self, namespace: bytes, data: bytes) -> LlguidanceMask | XgrammarMask:
        """Return a mask at the grammar's start. Raises `GrammarInvalid`, also for bytes that are no spec."""
        try:
            spec = decode_spec(data)
        except msgspec.DecodeError as error:
            raise GrammarInvalid(f"not a grammar spec: {error}") from error
        backends = self._ready()
        compiled = self._cache.get(namespace, (spec.backend, spec.source), lambda: backends.compile(spec))
        return compiled.mask(backends.closer, fast_forward=spec.fast_forward, closes=spec.close)

    def _ready(self) -> _Backends:
        with self._lock:
            if self._backends is None:
                llguidance = LlguidanceCompiler(self._vocabulary, self._limits.llguidance)
                xgrammar = XgrammarCompiler(self._vocabulary, llguidance.tokenizer)
                self._backends = _Backends(llguidance, xgrammar, CloseFinder(self._vocabulary))
            return self._backends
