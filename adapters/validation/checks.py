"""Matches an adapter's tensors strictly with its configuration and the base model, and scans every value.

The first failed check rejects the adapter and names the tensor or module; the report has every check until then.
"""

from collections.abc import Iterable, Iterator, Mapping

from loraplex.adapters.errors import TensorsRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.report import Check, ValidationReport
from loraplex.adapters.storage.safe_files import OpenFile
from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.peft_config import PeftConfig
from loraplex.adapters.validation.safetensors_header import TensorEntry, read_header
from loraplex.adapters.validation.tensor_names import (
    LoraPair,
    Problem,
    TensorAssignment,
    assign_tensors,
    base_copy_problems,
    pair_problems,
    pairs,
    pattern_problems,
    rank_problems,
    shape_problems,
    target_problems,
)
from loraplex.adapters.validation.tensor_scan import TensorValues, scan_tensor


class _Checklist:
    """Builds a report; the first problem of a check ends it."""

    def __init__(self, report: ValidationReport) -> None:
        self.report = report

    def require(self, name: str, problems: Iterable[Problem], passed: str) -> None:
        problem = next(iter(problems), None)
        if problem is None:
            self.report = self.report.with_check(Check(name, True, passed))
            return
        subject, message = problem
        self.report = self.report.with_check(Check(name, False, f"{subject}: {message}"))
        raise TensorsRejected(name, subject, message, self.report)

    def warn(self, name: str, detail: str) -> None:
        self.report = self.report.with_check(Check(name, True, detail, warning=True))


def match_tensors(
    manifest: PeftConfig,
    header: Mapping[str, TensorEntry],
    modules: Mapping[str, AdaptableModule],
    report: ValidationReport,
) -> tuple[tuple[LoraPair, ...], ValidationReport]:
    """Run every check that needs no tensor value and add it to `report`. Raises `TensorsRejected`."""
    assignment = assign_tensors(header, modules)
    checklist = _Checklist(report)
    checklist.require(
        "tensor_names", assignment.unknown, f"{len(header)} tensors match modules of the base model"
    )
    checklist.require(
        "target_modules",
        target_problems(manifest, assignment),
        f"{len(assignment.paths)} modules are targeted and have tensors",
    )
    checklist.require(
        "patterns", pattern_problems(manifest, assignment), "every pattern matches a targeted module"
    )
    checklist.require("pairs", pair_problems(assignment), "every module has both halves")
    checklist.require("shapes", shape_problems(assignment), "every tensor fits its module")
    checklist.require(
        "ranks", rank_problems(manifest, assignment), "every rank is that of adapter_config.json"
    )
    _check_base_copies(checklist, assignment)
    return pairs(manifest, assignment), checklist.report


def validate_adapter(
    weights: OpenFile, manifest: PeftConfig, modules: Mapping[str, AdaptableModule], limits: AdapterLimits
) -> ValidationReport:
    """Run all checks of a safetensors file; `modules` are those of `adaptable_modules`.

    Raises `HeaderRejected` or `TensorsRejected`, or `EOFError` when the file shrinks.
    """
    checklist = _Checklist(ValidationReport())
    header = read_header(weights, limits)
    checklist.require("manifest", (), "adapter_config.json describes a plain LoRA")
    checklist.require("header", (), f"{len(header)} tensors cover the file's {weights.size} bytes exactly")
    lora_pairs, checklist.report = match_tensors(manifest, header, modules, checklist.report)
    values = {name: scan_tensor(weights.descriptor, entry) for name, entry in header.items()}
    checklist.require("finite", _finite_problems(values), "every value is finite")
    _check_effect(checklist, lora_pairs, values)
    return checklist.report


def _check_base_copies(checklist: _Checklist, assignment: TensorAssignment) -> None:
    checklist.require(
        "base_copies", base_copy_problems(assignment), "no copy of base weights has another shape"
    )
    if assignment.base_copies:
        names = ", ".join(sorted(entry.name for entry in assignment.base_copies.values()))
        checklist.warn("base_copies", f"{names}: the base model's own weights are used instead of this copy")


def _finite_problems(values: Mapping[str, TensorValues]) -> Iterator[Problem]:
    for name, tensor in values.items():
        if tensor.non_finite:
            yield name, f"holds {tensor.non_finite} values that are NaN or infinite"


def _check_effect(
    checklist: _Checklist, lora_pairs: tuple[LoraPair, ...], values: Mapping[str, TensorValues]
) -> None:
    if any(not values[pair.a.name].all_zero and not values[pair.b.name].all_zero for pair in lora_pairs):
        checklist.require("effect", (), "the adapter changes the base model")
    else:
        checklist.warn("effect", "in every module A or B is all zeros: the adapter changes nothing")
