"""The mask measurement on a tiny vocabulary: every case has its figures, and a wrong text would be noticed."""

import dataclasses
from pathlib import Path

import pytest
from tests.benchmarks import grammar_masks
from tests.benchmarks.grammar_masks import MaskShape, measure_masks
from tests.benchmarks.grammar_process import MaskJob, measure_masks_as_engine
from tests.benchmarks.large_vocabulary import larger_tokenizer

from loraplex.grammar.tree import Literal
from loraplex.platform.bench.errors import BenchFailed
from loraplex.platform.bench.grammar_shapes import GrammarShape

SHAPE = MaskShape(rows=3, steps=4, large=700, text_bytes=100_000)


@pytest.mark.long
def test_every_vocabulary_backend_and_grammar(tiny_model: Path) -> None:
    report = measure_masks_as_engine(MaskJob(str(tiny_model), SHAPE))
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
