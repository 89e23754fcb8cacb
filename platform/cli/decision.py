"""`loraplex decision`: calibrate the probabilities of an adapter's decisions by examples, through a running server.

Invariant: what is printed is measured on the half of the examples that no temperature was found on.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer

from loraplex.platform.cli.command_context import DataDir, exit_codes
from loraplex.platform.cli.output import print_rows
from loraplex.platform.cli.remote_server import client_options, problem_of, read_key, send, server_url
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.decisions.calibration import (
    Labelled,
    best_temperature,
    quality_of,
    tempered,
)
from loraplex.platform.inference.decisions.pipeline import CALIBRATION_HEADER, FORMAT_HEADER, PREFIX
from loraplex.platform.parameters.decision_request import (
    MAX_QUESTIONS,
    ChoiceQuestion,
    DecisionRequest,
    PredicateQuestion,
    Question,
)
from loraplex.platform.parameters.request_object import read_object
from loraplex.platform.processes.progress import shown_progress
from loraplex.platform.startup_errors import RequestFailed, SettingsError
from loraplex.tenants.registry.resolution import parse_model_reference

MIN_EXAMPLES: Final = 20
"""Of one type: fewer say nothing about ten bins."""
MAX_EXAMPLES: Final = 100_000
COLUMNS: Final = ("type", "examples", "temperature", "accuracy", "brier", "ece")

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Decisions: typed questions that an adapter answers with probabilities."""


@dataclass(frozen=True, slots=True)
class Example:
    """One line of the file: `question` as it is sent, and the option that answers it."""

    input: Any
    question: Mapping[str, Any]
    type: str
    right: int


@app.command("calibrate")
def calibrate(
    adapter: Annotated[str, typer.Option(help="NAME@VERSION.")],
    examples: Annotated[
        Path,
        typer.Option(
            exists=True, dir_okay=False, help='JSON lines {"input": …, "question": …, "answer": …}.'
        ),
    ],
    key: Annotated[
        str,
        typer.Option(help="A key with the scopes inference, adapters:read and adapters:write; - reads it."),
    ],
    url: Annotated[str | None, typer.Option(help="The server; default that of the data directory.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Find a temperature for each type of question on every other example, measure it on the rest, and write it."""
    with exit_codes():
        reference = parse_model_reference(adapter)
        if reference is None or reference.version is None:
            raise SettingsError(f"--adapter {adapter}: must be NAME@VERSION")
        secret, address = read_key(key), server_url(url, data_dir)
        read = [*read_examples(examples)]
        place = f"adapters/{reference.name}/versions/{reference.version}/decision-calibration"
        with (
            httpx.Client(**client_options(address, secret, "v1")) as inference,
            httpx.Client(**client_options(address, secret, "tenant/v1")) as tenant,
        ):
            model = send(inference, "GET", f"models/{adapter}").json()
            known, earlier = tenant.get(place), {"none": dict[str, float]()}
            if known.is_success:
                earlier[known.json()["sha256"][:PREFIX]] = known.json()["temperatures"]
            elif known.status_code != httpx.codes.NOT_FOUND:
                raise RequestFailed(problem_of(known))
            labelled, wording = _labelled(inference, adapter, read, earlier)
            rows, found = _measure(labelled)
            body = {"format": wording, "system_fingerprint": model["system_fingerprint"], **found}
            written = send(tenant, "PUT", place, body).json()
        print_rows(rows, False, COLUMNS)
        typer.echo(f"{adapter}: calibration {written['sha256'][:PREFIX]}")


def read_examples(file: Path) -> Iterator[Example]:
    """Yield the examples of a file. Raises `SettingsError` with the line at fault."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            if number > MAX_EXAMPLES:
                raise SettingsError(f"{where}: at most {MAX_EXAMPLES} examples")
            try:
                example = json.loads(line)
                given = {"model": "any", "input": example["input"], "questions": [example["question"]]}
                [question] = read_object(DecisionRequest, given).questions
                if question.model is not None:
                    raise ValueError("`model`: --adapter says which adapter is asked")
                right = options_values(question).index(example["answer"])
            except (ValueError, KeyError, TypeError, InvalidParameter) as error:
                raise SettingsError(f"{where}: {error!r}") from error
            yield Example(example["input"], example["question"], question.type, right)


def options_values(question: Question) -> list[object]:
    """Return what answers a question: true and false, a value, or a level's label."""
    if isinstance(question, PredicateQuestion):
        return [True, False]
    if isinstance(question, ChoiceQuestion):
        return [each.value for each in question.choices]
    return [each.label for each in question.levels]


def _labelled(
    server: httpx.Client, adapter: str, examples: list[Example], earlier: Mapping[str, Mapping[str, float]]
) -> tuple[dict[str, list[Labelled]], str]:
    """Ask each question; return the probabilities before any calibration, by type, and the format of the decisions.

    `earlier`: the temperatures that the server may apply, by the header that names them.
    """
    found, wording = defaultdict[str, list[Labelled]](list), ""
    inputs = [[*each] for _, each in groupby(examples, lambda example: json.dumps(example.input))]
    batches = [each[at : at + MAX_QUESTIONS] for each in inputs for at in range(0, len(each), MAX_QUESTIONS)]
    with shown_progress() as progress:
        for batch in progress.tracked(f"asking {len(examples)} questions", batches):
            questions = [each.question for each in batch]
            body = {"model": adapter, "input": batch[0].input, "questions": questions}
            response = send(server, "POST", "decisions", body)
            wording = response.headers[FORMAT_HEADER]
            applied = earlier.get(response.headers[CALIBRATION_HEADER])
            if applied is None:
                raise RequestFailed(f"{adapter} was calibrated by another meanwhile: try again")
            for each, answer in zip(batch, response.json()["answers"], strict=True):
                # What an earlier calibration did is undone.
                raw = tempered(_probabilities(answer), 1 / applied.get(each.type, 1.0))
                found[each.type].append(Labelled(raw, each.right))
    return found, wording


def _probabilities(answer: Mapping[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        # Nearer to 1 a probability of 64 bits has no complement.
        return [answer["probability"], max(1 - answer["probability"], 2**-53)]
    return [each["probability"] for each in answer["probabilities"]]


def _measure(labelled: Mapping[str, list[Labelled]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows to print, and temperatures and report as the server takes them. Raises `SettingsError`."""
    rows: list[dict[str, Any]] = []
    temperatures: dict[str, float] = {}
    report: dict[str, Any] = {}
    for kind, examples in labelled.items():
        if len(examples) < MIN_EXAMPLES:
            raise SettingsError(f"{len(examples)} examples of type {kind}: give at least {MIN_EXAMPLES}")
        temperature = temperatures[kind] = best_temperature(examples[::2])
        rest = examples[1::2]
        after = [Labelled(tempered(each.probabilities, temperature), each.right) for each in rest]
        qualities = {"before": quality_of(rest).model_dump(), "after": quality_of(after).model_dump()}
        report[kind] = {"examples": len(rest), **qualities}
        changes = {
            name: f"{qualities['before'][name]:.3f} -> {qualities['after'][name]:.3f}"
            for name in ("accuracy", "brier", "ece")
        }
        rows.append({"type": kind, "examples": len(rest), "temperature": f"{temperature:.3f}", **changes})
    return rows, {"temperatures": temperatures, "report": report}
