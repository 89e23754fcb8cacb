"""`loraplex grammar`: checks how schemas are enforced, without a server. JSON lines on standard output, all else on standard error."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from loraplex.grammar.backends.vocabulary import Vocabulary, byte_vocabulary, load_vocabulary
from loraplex.grammar.check import BadLine, Case, Checker, read_cases

app = typer.Typer(
    name="grammar", help="How schemas are enforced while a response is decoded.", no_args_is_help=True
)


@app.callback()
def grammar() -> None:
    """How schemas are enforced while a response is decoded."""


@app.command()
def check(
    jsonl: Annotated[Path, typer.Option("--jsonl", help='Lines {"schema": …, "documents": [text, …]}.')],
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A model's folder; default: one token per byte.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse schemas that the grammar alone does not enforce.")
    ] = False,
) -> None:
    """Print how each schema is enforced, and which of its documents would be accepted."""
    try:
        checker = Checker(byte_vocabulary() if tokenizer is None else _vocabulary(tokenizer))
        _run(checker, read_cases(_lines(jsonl)), strict)
    except (BadLine, OSError, UnicodeDecodeError) as error:
        typer.echo(f"{jsonl}: {error}" if isinstance(error, BadLine) else str(error), err=True)
        raise typer.Exit(1) from error


def _run(checker: Checker, cases: Iterator[Case], strict: bool) -> None:
    counts: Counter[str] = Counter()
    accepted = documents = unexpected = 0
    for case in cases:
        report = checker.check(case, strict=strict)
        typer.echo(json.dumps(report.as_line()))
        if report.reason is not None:
            typer.echo(f"schema {counts.total() + 1}: {report.reason}", err=True)
        counts[report.enforcement] += 1
        accepted += sum(report.accepted)
        documents += len(report.accepted)
        unexpected += report.is_unexpected
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ("full", "validated", "refused"))
    typer.echo(f"{counts.total()} schemas: {kinds}; {accepted} of {documents} documents accepted", err=True)
    if unexpected:
        typer.echo(f"{unexpected} refused by an unexpected error: please report them", err=True)


def _lines(jsonl: Path) -> Iterator[str]:
    with jsonl.open(encoding="utf-8") as file:
        yield from file


def _vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a model's folder, with the end token of its configuration."""
    found = load_vocabulary(folder, 1, frozenset({0}))
    size = found.tokenizer.get_vocab_size(with_added_tokens=True)
    ends = [found.tokenizer.token_to_id(text) for text in _end_texts(folder)]
    known = frozenset(token_id for token_id in ends if token_id is not None)
    return load_vocabulary(folder, size, known or frozenset({size - 1}))


def _end_texts(folder: Path) -> list[str]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return []
    token = json.loads(path.read_text("utf-8")).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return [text] if isinstance(text, str) else []
