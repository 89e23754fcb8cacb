"""The cost of grammar masks without HTTP: compile, fill for a batch, advance by one token, apply to logits.

Invariant: each mask is filled at a new state each step, and it allows the next token of its row.
"""

import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, get_args

import msgspec
import torch
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.large_vocabulary import TEXT_BYTES, larger_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.kernels.bitmask import apply_bitmask
from loraplex.engine.token_mask import TokenMask
from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of
from loraplex.grammar.tools.call_tree import calls_tree
from loraplex.grammar.tree import JsonValue, Node
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.lora import run_in_subprocess
from loraplex.platform.bench.report import BenchFailed, Case, Report
from loraplex.platform.bench.structured_output import THREE_FIELDS, TOOLS, TWELVE_FIELDS, Schema
from loraplex.platform.bench.workload import WORDS

MODULE = "tests.benchmarks.grammar_masks"
COLUMNS = (
    "compile_ms",
    "fill_p50_ms",
    "fill_p99_ms",
    "row_p50_us",
    "row_p99_us",
    "advance_p50_ms",
    "apply_p50_ms",
)
EMITTERS = {"llguidance": emit_llguidance.emit, "xgrammar": emit_xgrammar.emit}
NAMESPACE = bytes(32)
WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class MaskShape:
    """`rows` matchers that advance one token per step, for `steps` counted steps; `large` tokens of the larger vocabulary."""

    rows: int = 64
    steps: int = 200
    large: int = 131_072
    text_bytes: int = TEXT_BYTES


class MaskJob(msgspec.Struct, frozen=True):
    """The input of the measuring process."""

    model: str
    shape: MaskShape


@dataclass(frozen=True, slots=True)
class GrammarShape:
    """A grammar and texts that it generates; `text_of` maps a seed to one text."""

    name: str
    node: Node
    text_of: Callable[[int], str]


def measure_masks(model: str, shape: MaskShape) -> Report:
    """Measure each vocabulary, backend and grammar. Raises `BenchFailed` or `ModelError`."""
    report = Report("grammar-masks", COLUMNS)
    served = served_vocabulary(model)
    for vocabulary in (served, larger_vocabulary(served, shape)):
        size = f"{vocabulary.vocab_size:,} tokens"
        for backend in get_args(Backend):
            for grammar in grammar_shapes():
                figure = _measure(vocabulary, backend, grammar, shape)
                report.cases.append(Case(f"{size}, {backend}, {grammar.name}", asdict(shape), figure))
        report.cases.append(Case(f"{size}, apply", asdict(shape), _measure_apply(vocabulary, shape)))
    report.notes += [
        "fill and advance are those of all rows of a step, one after another on one thread; row is one fill.",
        f"the larger vocabulary is byte-level BPE, trained here on {shape.text_bytes >> 20} MiB of installed packages' texts.",
    ]
    return report


def served_vocabulary(model: str) -> Vocabulary:
    """The vocabulary of a model folder, as the engine reads it."""
    config = load_model_config(model)
    text = Path(model, "tokenizer.json").read_text("utf-8")
    return Vocabulary(text, config.vocab_size, frozenset(config.eos_token_ids))


def larger_vocabulary(served: Vocabulary, shape: MaskShape) -> Vocabulary:
    """A vocabulary of `shape.large` tokens with the end tokens of `served`. Raises `BenchFailed`."""
    text = larger_tokenizer(served.tokenizer_json, shape.large, shape.text_bytes)
    ids: dict[str, int] = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    ends = frozenset(ids[served.encoded_tokens[token_id]] for token_id in served.end_token_ids)
    return Vocabulary(text, shape.large, ends)


def _measure(
    vocabulary: Vocabulary, backend: Backend, grammar: GrammarShape, shape: MaskShape
) -> dict[str, Any]:
    compiler = MaskCompiler(vocabulary)
    compiler.warm_up()
    spec = encode_spec(GrammarSpec(backend=backend, source=EMITTERS[backend](grammar.node)))
    began = time.perf_counter()
    compiler.compile(NAMESPACE, spec)
    compile_ms = (time.perf_counter() - began) * 1000
    rows = [MatcherRow(compiler, spec, vocabulary, grammar, number) for number in range(shape.rows)]
    bitmask = torch.zeros(shape.rows, vocabulary.bitmask_words, dtype=torch.int32)
    fills: list[list[float]] = []
    advances: list[float] = []
    for _ in range(WARM_STEPS + shape.steps):
        fills.append([row.fill(bitmask, number) for number, row in enumerate(rows)])
        advances.append(sum(row.advance(bitmask, number) for number, row in enumerate(rows)))
    steps = [sum(step) for step in fills[WARM_STEPS:]]
    single = [seconds for step in fills[WARM_STEPS:] for seconds in step]
    return {
        "compile_ms": compile_ms,
        "fill_p50_ms": percentile(steps, 50) * 1000,
        "fill_p99_ms": percentile(steps, 99) * 1000,
        "row_p50_us": percentile(single, 50) * 1e6,
        "row_p99_us": percentile(single, 99) * 1e6,
        "row_max_us": max(single) * 1e6,
        "advance_p50_ms": median(advances[WARM_STEPS:]) * 1000,
    }


class MatcherRow:
    """A matcher that consumes one text after another; the rows of a batch are at different positions."""

    def __init__(
        self, compiler: MaskCompiler, spec: bytes, vocabulary: Vocabulary, grammar: GrammarShape, number: int
    ) -> None:
        self._start: Callable[[], TokenMask] = lambda: compiler.compile(NAMESPACE, spec)
        self._end = min(vocabulary.end_token_ids)
        self._texts = (self._tokens(vocabulary, grammar.text_of(seed)) for seed in count(number * 1_000_000))
        self._mask: TokenMask = self._start()
        self._rest = self._next()
        for _ in range(number % 16):
            self._accept()

    def fill(self, bitmask: Tensor, row: int) -> float:
        """Fill the mask; return the seconds."""
        began = time.perf_counter()
        self._mask.fill(bitmask, row)
        return time.perf_counter() - began

    def advance(self, bitmask: Tensor, row: int) -> float:
        """Accept the next token; return the seconds. After a finished text the next one starts.

        Raises `BenchFailed` if the mask forbids the token.
        """
        token = self._rest[0]
        if not int(bitmask[row, token // 32]) >> token % 32 & 1:
            raise BenchFailed(f"a mask forbids token {token} of a text its grammar generates")
        began = time.perf_counter()
        self._accept()
        took = time.perf_counter() - began
        if not self._rest:
            self._mask, self._rest = self._start(), self._next()
        return took

    def _accept(self) -> None:
        token = self._rest.pop(0)
        if not self._mask.accept(token) and token != self._end:
            raise BenchFailed(f"a matcher refuses token {token} of a text its grammar generates")

    def _next(self) -> list[int]:
        return next(self._texts)

    def _tokens(self, vocabulary: Vocabulary, text: str) -> list[int]:
        ids: Sequence[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        return [*ids, self._end]


def _measure_apply(vocabulary: Vocabulary, shape: MaskShape) -> dict[str, Any]:
    """Apply masks to all rows at once as the sampler does, with half of the tokens allowed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape.rows, vocabulary.vocab_size, generator=generator)
    bitmask = torch.randint(
        -(2**31), 2**31, (shape.rows, vocabulary.bitmask_words), dtype=torch.int32, generator=generator
    )
    rows = torch.arange(shape.rows)
    times = WARM_STEPS + max(shape.steps // 4, 1)
    seconds = [_timed(lambda: apply_bitmask(logits, rows, bitmask)) for _ in range(times)][WARM_STEPS:]
    return {
        "apply_p50_ms": percentile(seconds, 50) * 1000,
        "apply_p99_ms": percentile(seconds, 99) * 1000,
    }


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def grammar_shapes() -> list[GrammarShape]:
    calls = calls_tree(syntax_of(ToolStyle.LLAMA3), TOOLS, parallel=False)
    return [
        GrammarShape("3 fields", JsonValue(THREE_FIELDS), lambda seed: json.dumps(_three_fields(seed))),
        GrammarShape("12 fields", JsonValue(TWELVE_FIELDS), lambda seed: json.dumps(_twelve_fields(seed))),
        GrammarShape(f"{len(TOOLS)} tools", calls, _call),
    ]


def _words(drawn: random.Random, most: int) -> str:
    return " ".join(drawn.choices(WORDS, k=drawn.randint(1, most)))


def _three_fields(seed: int) -> dict[str, Any]:
    drawn = random.Random(seed)
    return {"name": _words(drawn, 3), "age": drawn.randint(0, 99), "city": _words(drawn, 2)}


def _twelve_fields(seed: int) -> dict[str, Any]:
    drawn = random.Random(seed)
    return {
        "id": str(uuid.UUID(int=drawn.getrandbits(128), version=4)),
        "name": _words(drawn, 3),
        "age": drawn.randint(0, 150),
        "score": round(drawn.uniform(0, 100), 2),
        "active": drawn.random() < 0.5,
        "role": drawn.choice(TWELVE_FIELDS["properties"]["role"]["enum"]),
        "email": f"{drawn.choice(WORDS)}@{drawn.choice(WORDS)}.org",
        "joined": f"20{drawn.randint(10, 29)}-{drawn.randint(1, 12):02}-{drawn.randint(1, 28):02}",
        "tags": [drawn.choice(WORDS) for _ in range(drawn.randint(0, 5))],
        "address": {"street": _words(drawn, 3), "zip": f"{drawn.randint(0, 99999):05}"},
        "note": None if drawn.random() < 0.5 else _words(drawn, 10),
        "level": drawn.randint(1, 3),
    }


def _call(seed: int) -> str:
    drawn = random.Random(seed)
    name = drawn.choice(list(TOOLS))
    arguments = {field: _argument(drawn, schema) for field, schema in TOOLS[name]["properties"].items()}
    syntax = syntax_of(ToolStyle.LLAMA3)
    return (
        f"{syntax.opening}{syntax.head(name)}{json.dumps(arguments)}{syntax.after_arguments}{syntax.closing}"
    )


def _argument(drawn: random.Random, schema: Schema) -> object:
    if "enum" in schema:
        return drawn.choice(schema["enum"])
    if schema.get("format") == "date":
        return f"2026-{drawn.randint(1, 12):02}-{drawn.randint(1, 28):02}"
    match schema["type"]:
        case "integer":
            return drawn.randint(schema["minimum"], schema["maximum"])
        case "number":
            return round(drawn.uniform(0, 1000), 2)
        case "boolean":
            return drawn.random() < 0.5
    return _words(drawn, 6)


def measure_in_subprocess(job: MaskJob) -> Report:
    """Run the job in a child process. Raises `BenchFailed`."""
    return run_in_subprocess(MODULE, job, CHECKOUT)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=MaskJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure_masks(job.model, job.shape)) + b"\n")


if __name__ == "__main__":
    main()
