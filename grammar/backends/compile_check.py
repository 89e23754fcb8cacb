"""Compile check of one grammar: compiles it with the engine's own compiler and fills the first mask.

Invariant: any error of a library becomes a result. It bounds neither time nor memory: servers run it in a process that can be
killed.
"""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.grammar_memory import return_free_memory
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import GrammarSpec, encode_spec
from loraplex.grammar.tree import JsonValue

FirstMask: TypeAlias = Callable[[GrammarSpec], int]
"""Compiles and fills the first mask; returns 0 when no token is allowed. Raises `GrammarError` or a library's error."""
Outcome: TypeAlias = Literal["accepted", "invalid", "unsatisfiable", "memory", "size"]

NAMESPACE: Final = b""
NO_TOKEN: Final = "NoExtension"
"""llguidance's error for an empty first mask."""
ANY_OBJECT: Final = JsonValue({"type": "object"})
MAX_TEXT: Final = 400

_SOURCE_PLACE: Final = re.compile(
    r"^\s*(?:\[[^\]\n]{0,40}\]\s*)?\S+\.(?:cc|cpp|cxx|h|hpp|rs|py):\d+(?::\d+)?:?\s*", re.MULTILINE
)
_FAILED_CHECK: Final = re.compile(r"Check failed: \(.*?\) is false:\s*")
_LISTING: Final = re.compile(r"^\s*(?:\d+ \|.*|\^+)$", re.MULTILINE)
_LARK_PLACE: Final = re.compile(r"^at (\d+)\((\d+)\): ")
_MARKS_OF_EXHAUSTION: Final = ("bad_alloc", "memory allocation", "cannot allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSetup:
    """`tokenizer` is a model folder or a `tokenizer.json`, `vocab_size` the model's own. `grammar_bytes` is what a compiled
    grammar and its first mask may keep.
    """

    tokenizer: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    grammar_bytes: int


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`text` is the library's error text, cleaned; `bytes` the memory that the grammar keeps."""

    outcome: Outcome
    text: str = ""
    bytes: int = 0


def prepare(setup: CompileSetup) -> Callable[[GrammarSpec], CheckResult]:
    """Import both libraries, build their tokenizers and compile once with each; return the check.

    Raises `OSError` or `ValueError` for the tokenizer.
    """
    given = Path(setup.tokenizer)
    file = given / "tokenizer.json" if given.is_dir() else given
    vocabulary = Vocabulary(file.read_text("utf-8"), setup.vocab_size, frozenset(setup.end_token_ids))
    first_mask = first_mask_of(vocabulary)
    first_mask(GrammarSpec(backend="llguidance", source=emit_llguidance.emit(ANY_OBJECT)))
    first_mask(GrammarSpec(backend="xgrammar", source=emit_xgrammar.emit(ANY_OBJECT)))
    gc.collect()
    return_free_memory()
    return checker(first_mask, setup.grammar_bytes)


def first_mask_of(vocabulary: Vocabulary) -> FirstMask:
    """Build both libraries' form of the vocabulary."""
    # Imported by the process that checks only: a gateway imports this module too, and has neither library.
    import torch

    from loraplex.grammar.backends.compiler import MaskCompiler

    compiler = MaskCompiler(vocabulary)
    compiler.warm_up()

    def first_mask(spec: GrammarSpec) -> int:
        bitmask = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
        compiler.compile(NAMESPACE, encode_spec(spec)).fill(bitmask, 0)
        return int(bitmask.count_nonzero())

    return first_mask


def checker(first_mask: FirstMask, grammar_bytes: int) -> Callable[[GrammarSpec], CheckResult]:
    """Return the check of one grammar."""

    def check(spec: GrammarSpec) -> CheckResult:
        before = resident_bytes()
        try:
            allowed = first_mask(spec)
        # A panic of a Rust library is not an `Exception`.
        except BaseException as error:  # noqa: BLE001
            return _result_of_error(error)
        kept = max(0, resident_bytes() - before)
        if allowed == 0:
            return CheckResult("unsatisfiable", bytes=kept)
        return CheckResult("accepted" if kept <= grammar_bytes else "size", bytes=kept)

    return check


def resident_bytes() -> int:
    """Return the anonymous resident memory of this process, including pages shared with its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _result_of_error(error: BaseException) -> CheckResult:
    text = clean(str(error))
    if ran_out_of_memory(error):
        return CheckResult("memory", text)
    return CheckResult("unsatisfiable" if NO_TOKEN in text else "invalid", text)


def clean(text: str) -> str:
    """Return a library's error text for tenants: one line of at most 400 characters, without places in library source."""
    text_left = _LISTING.sub("", _FAILED_CHECK.sub("", _SOURCE_PLACE.sub("", text)))
    text_left = _LARK_PLACE.sub(r"line \1, column \2: ", text_left)
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text_left).split())
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether a library's error reports a failed allocation."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(mark in text for mark in _MARKS_OF_EXHAUSTION)
