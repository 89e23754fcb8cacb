"""`MaskCompiler`: bytes of a `GrammarSpec` to a mask at the start of its grammar; the engine's `TokenMaskFactory`.

Invariant: what one tenant compiles neither evicts nor speeds up another tenant's.
"""

import threading
from dataclasses import dataclass, field

import msgspec

from loraplex.grammar.backends.compiled_cache import CompiledCache
from loraplex.grammar.backends.forced_close import Closer
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


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """Bytes of compiled grammars kept, and the work llguidance may do."""

    cache_bytes: int = 512 * 2**20
    tenant_cache_bytes: int = 128 * 2**20
    llguidance: LlguidanceLimits = field(default_factory=LlguidanceLimits)


@dataclass(frozen=True, slots=True)
class _Backends:
    """Both libraries' view of the vocabulary."""

    llguidance: LlguidanceCompiler
    xgrammar: XgrammarCompiler
    closer: Closer

    def compile(self, spec: GrammarSpec) -> CompiledLlguidance | CompiledXgrammar:
        compiler = self.llguidance if spec.backend == "llguidance" else self.xgrammar
        return compiler.compile(spec.source)


class MaskCompiler:
    """For one vocabulary. Safe to use from several threads; every call may take long and belongs on a side thread."""

    def __init__(self, vocabulary: Vocabulary, limits: CompilerLimits | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or CompilerLimits()
        self._lock = threading.Lock()
        self._backends: _Backends | None = None
        self._cache: CompiledCache[CompiledLlguidance | CompiledXgrammar] = CompiledCache(
            self._limits.cache_bytes, self._limits.tenant_cache_bytes
        )

    def warm_up(self) -> None:
        """Build what every grammar needs, so that the first request does not wait for it: seconds for 128k tokens."""
        self._ready()

    def compile(self, namespace: bytes, data: bytes) -> LlguidanceMask | XgrammarMask:
        """A mask at the start of the grammar. Raises `GrammarInvalid`, also for bytes that are no spec."""
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
                self._backends = _Backends(llguidance, xgrammar, Closer(self._vocabulary))
            return self._backends
