"""The mask measurement on a tiny vocabulary: every case has its figures, and a wrong text would be noticed."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
from tests.benchmarks import grammar_masks
from tests.benchmarks.grammar_masks import (
    EMITTERS,
    NAMESPACE,
    GrammarShape,
    MaskJob,
    MaskShape,
    grammar_shapes,
    measure_in_subprocess,
    measure_masks,
)
from tests.benchmarks.large_vocabulary import larger_tokenizer

from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tree import Literal
from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.bench.structured_output import THREE_FIELDS, TWELVE_FIELDS

SHAPE = MaskShape(rows=3, steps=4, large=700, text_bytes=100_000)


@pytest.mark.long
def test_every_vocabulary_backend_and_grammar(tiny_model: Path) -> None:
    report = measure_in_subprocess(MaskJob(str(tiny_model), SHAPE))
    assert len(report.cases) == 2 * (2 * 3 + 1)
    assert any(case.name.startswith("700 tokens, llguidance") for case in report.cases)
    for case in report.cases:
        names = (
            ("apply_p50_ms",) if case.name.endswith("apply") else ("compile_ms", "fill_p50_ms", "row_p99_us")
        )
        assert all(case.figure[name] > 0 for name in names), case


def test_a_text_the_grammar_does_not_generate_is_no_measurement(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = GrammarShape("wrong", Literal("some other text"), lambda seed: "some text")
    monkeypatch.setattr(grammar_masks, "grammar_shapes", lambda: [wrong])
    with pytest.raises(BenchFailed, match="token"):
        measure_masks(str(tiny_model), dataclasses.replace(SHAPE, rows=1))


def test_more_tokens_than_the_texts_hold(tiny_model: Path) -> None:
    text = (tiny_model / "tokenizer.json").read_text()
    with pytest.raises(BenchFailed, match="5000000 are needed"):
        larger_tokenizer(text, 5_000_000, text_bytes=10_000)


@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize("shape", grammar_shapes(), ids=lambda shape: shape.name)
def test_every_text_of_a_shape_is_allowed_to_its_end(backend: Backend, shape: GrammarShape) -> None:
    vocabulary = byte_vocabulary()
    spec = GrammarSpec(backend=backend, source=EMITTERS[backend](shape.node))
    compiler = MaskCompiler(vocabulary)
    for seed in range(20):
        mask = compiler.compile(NAMESPACE, encode_spec(spec))
        text = shape.text_of(seed)
        for token in vocabulary.tokenizer.encode(text).ids:
            assert mask.accept(token), text
        assert mask.is_complete(), text


def test_texts_differ_by_seed_and_repeat_by_seed() -> None:
    for shape in grammar_shapes():
        assert len({shape.text_of(seed) for seed in range(50)}) > 30
        assert shape.text_of(7) == shape.text_of(7)


def test_every_text_of_a_schema_is_valid_under_it() -> None:
    for shape, schema in zip(grammar_shapes(), (THREE_FIELDS, TWELVE_FIELDS), strict=False):
        for seed in range(20):
            jsonschema.validate(json.loads(shape.text_of(seed)), schema)
