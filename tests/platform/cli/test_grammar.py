"""`loraplex grammar check` on files, with and without a model's tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.platform.cli.main import main

CASES = [
    {"schema": {"type": "integer", "minimum": 3}, "documents": ["3", "2", '"a"']},
    {"schema": {"uniqueItems": True}, "documents": ["[1,2]", "[1,1]"]},
    {"schema": {"$ref": "#"}, "documents": ["1"]},
]


def run(path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    result = CliRunner().invoke(main, ["grammar", "check", "--jsonl", str(path), *arguments])
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, CASES)))
    return path


def test_lines_and_summary(jsonl: Path) -> None:
    code, lines, summary = run(jsonl)
    assert code == 0
    assert [line["enforcement"] for line in lines] == ["full", "validated", "refused"]
    assert [line["accepted"] for line in lines] == [[True, False, False], [True, False], [False]]
    assert lines[2]["refused_at"] == "" and lines[0]["refused_at"] is None
    assert "schema 3: schema: no document satisfies this schema" in summary
    assert "3 schemas: 1 full, 1 validated, 1 refused; 2 of 6 documents accepted" in summary


def test_strict(jsonl: Path) -> None:
    _, lines, _ = run(jsonl, "--strict")
    assert [(line["enforcement"], line["refused_at"]) for line in lines] == [
        ("full", None),
        ("refused", "/uniqueItems"),
        ("refused", ""),
    ]


def test_a_models_folder(jsonl: Path, tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    (tmp_path / "tokenizer.json").write_text(vocabulary.tokenizer_json)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    plain, own = run(jsonl), run(jsonl, "--tokenizer", str(tmp_path))
    for line in (*plain[1], *own[1]):
        del line["compile_ms"]
    assert plain[1] == own[1]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(CASES[0]) + "\n{}\n")
    code, lines, message = run(path)
    assert code == 1 and len(lines) == 1
    assert "line 2: must be" in message


def test_missing_files(tmp_path: Path, jsonl: Path) -> None:
    assert run(tmp_path / "none.jsonl")[0] == 1
    code, _, message = run(jsonl, "--tokenizer", str(tmp_path / "none"))
    assert code == 1 and "tokenizer.json" in message


def test_an_unexpected_error_ends_no_command_and_is_counted(
    jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("inside")

    monkeypatch.setattr("loraplex.grammar.enforcement.planner.recursive_groups", fail)
    code, lines, summary = run(jsonl)
    assert code == 0 and [line["enforcement"] for line in lines] == ["refused"] * 3
    assert "schema 1: this schema cannot be analysed: KeyError" in summary
    assert "3 refused by an unexpected error" in summary
