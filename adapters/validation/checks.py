"""Matches an adapter's tensors strictly with its configuration and the base model, and scans every value.

The first failed check rejects the adapter and names the tensor or module; the report has every check until then.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from loraplex.adapters.errors import PeftConfigRejected, Problem, TensorsRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.report import Check, ValidationReport
from loraplex.adapters.storage.safe_files import OpenFile
from loraplex.adapters.target_modules import AdaptableModule, BaseModel
from loraplex.adapters.validation.peft_config import PeftConfig
from loraplex.adapters.validation.peft_matching import ModuleMatcher, resolved, short_names
from loraplex.adapters.validation.safetensors_header import TensorEntry, read_header
from loraplex.adapters.validation.shown import shown
from loraplex.adapters.validation.tensor_assignment import (
    LoraPair,
    TensorAssignment,
    assign_tensors,
    half_tied_problems,
    pair_problems,
    pairs,
    rank_problems,
    saved_module_problems,
    shape_problems,
    target_problems,
    targets_without_tensors,
)
from loraplex.adapters.validation.tensor_names import TensorNames, plain_names, renamed
from loraplex.adapters.validation.tensor_values import TensorValues, copy_problems, scan_tensor

MANIFEST_PASSED: Final = Check("manifest", True, "adapter_config.json describes a plain LoRA")
MAX_LISTED: Final = 20
"""Names in one line of a report."""


class Checklist:
    """Builds a report; the first problem of a check ends it."""

    def __init__(self) -> None:
        self.report = ValidationReport()

    def require(self, name: str, problems: Iterable[Problem], passed: str, warning: str = "") -> None:
        """`warning`: what is said instead of `passed`, where it is not empty."""
        for subject, message in problems:
            self.report = self.report.with_check(Check(name, False, f"{subject}: {message}"))
            raise TensorsRejected(name, subject, message, self.report)
        self.report = self.report.with_check(Check(name, True, warning or passed, warning=bool(warning)))


@dataclass(frozen=True, slots=True)
class MatchedAdapter:
    """An adapter whose tensors fit. `config` is what is stored: literal names, and the table of other tensor names."""

    config: PeftConfig
    pairs: tuple[LoraPair, ...]
    assignment: TensorAssignment


def match_tensors(
    manifest: PeftConfig,
    header: Mapping[str, TensorEntry],
    base: BaseModel,
    checklist: Checklist,
) -> MatchedAdapter:
    """Run every check of an uploaded adapter that needs no tensor value. Raises `TensorsRejected`, `PeftConfigRejected`.

    A folder is validated again, with its canonical configuration, if the gateway ended while the engine probed it.
    """
    modules = base.modules
    names = plain_names(header, modules)
    plain = {names.canonical[name]: entry for name, entry in header.items()}
    if manifest.tensor_names and manifest.tensor_names != names.table:
        raise PeftConfigRejected("tensor_names", "is not of these tensors; remove it")
    # The names in a canonical configuration are those of the base model.
    assignment = assign_tensors(plain, modules, {} if manifest.tensor_names else names.seen)
    matcher = ModuleMatcher(manifest)
    checklist.require("tensor_names", (*names.problems, *assignment.unknown), _names_found(header, names))
    tied = half_tied_problems(assignment) if manifest.ensure_weight_tying and base.is_tied else ()
    _check_targets(checklist, manifest, matcher, assignment, tied)
    _check_fit(checklist, matcher, assignment)
    is_plain = matcher.is_literal and all(path == name for path, name in assignment.seen.items())
    config = manifest if is_plain else resolved(manifest, matcher, assignment.seen, modules)
    config = replace(config, tensor_names=names.table)
    return MatchedAdapter(config, pairs(matcher, assignment), assignment)


def match_stored(
    manifest: PeftConfig, header: Mapping[str, TensorEntry], modules: Mapping[str, AdaptableModule]
) -> tuple[LoraPair, ...]:
    """Match a stored adapter again by its table of names. Raises `TensorsRejected`."""
    plain = {renamed(name, manifest.tensor_names): entry for name, entry in header.items()}
    assignment = assign_tensors(plain, modules, {})
    matcher = ModuleMatcher(manifest)
    checklist = Checklist()
    checklist.require("tensor_names", assignment.unknown, "")
    checklist.require("target_modules", target_problems(matcher, assignment), "")
    _check_fit(checklist, matcher, assignment)
    return pairs(matcher, assignment)


def _check_targets(
    checklist: Checklist,
    manifest: PeftConfig,
    matcher: ModuleMatcher,
    assignment: TensorAssignment,
    tied: Iterable[Problem],
) -> None:
    saved = saved_module_problems(manifest, assignment)
    problems = (*target_problems(matcher, assignment), *saved, *tied)
    targeted = f"{len(assignment.seen)} modules are targeted and have tensors"
    if not isinstance(manifest.target_modules, frozenset):
        targeted = f"{targeted}: {_listed(short_names(assignment.seen, assignment.modules))}"
    missing = targets_without_tensors(manifest, matcher, assignment)
    warning = f"{targeted}; the file holds no tensor for {_listed(missing)}" if missing else ""
    checklist.require("target_modules", problems, targeted, warning)
    unused = matcher.unused_keys(assignment.seen.values())
    warning = f"{_listed(unused)} matches no targeted module" if unused else ""
    checklist.require("patterns", (), "every pattern matches a targeted module", warning)


def _check_fit(checklist: Checklist, matcher: ModuleMatcher, assignment: TensorAssignment) -> None:
    checklist.require("pairs", pair_problems(assignment), "every module has both halves")
    checklist.require("shapes", shape_problems(assignment), "every tensor fits its module")
    checklist.require(
        "ranks", rank_problems(matcher, assignment), "every rank is that of adapter_config.json"
    )


def validate_adapter(
    weights: OpenFile, manifest: PeftConfig, base: BaseModel, limits: AdapterLimits
) -> tuple[ValidationReport, MatchedAdapter]:
    """Run all checks of a safetensors file.

    Raises `HeaderRejected`, `PeftConfigRejected` or `TensorsRejected`, or `EOFError` when the file shrinks.
    """
    checklist = Checklist()
    header = read_header(weights, limits)
    _report_manifest(checklist, manifest, base)
    checklist.require("header", (), f"{len(header)} tensors cover the file's {weights.size} bytes exactly")
    matched = match_tensors(manifest, header, base, checklist)
    _check_base_copies(checklist, matched.assignment, weights, base)
    values = {name: scan_tensor(weights.descriptor, entry) for name, entry in header.items()}
    checklist.require("finite", _finite_problems(values), "every value is finite")
    _check_effect(checklist, matched.pairs, values)
    return checklist.report, matched


def _report_manifest(checklist: Checklist, manifest: PeftConfig, base: BaseModel) -> None:
    notes = [f"PEFT's defaults are used: {', '.join(manifest.defaults)}"] if manifest.defaults else []
    if base.names and manifest.base_model and not base.is_named(manifest.base_model):
        notes.append(
            f"base_model_name_or_path is {shown(manifest.base_model)}, and this server serves {base.names[0]}:"
            " an adapter of another model answers badly"
        )
    passed = MANIFEST_PASSED.detail
    checklist.require("manifest", (), passed, ". ".join((passed, *notes)) if notes else "")


def _names_found(header: Mapping[str, TensorEntry], names: TensorNames) -> str:
    found = f"{len(header)} tensors match modules of the base model"
    renames = sum(name != plain for name, plain in names.canonical.items())
    if not renames:
        return found
    name, plain = next(iter(names.table.items()))
    return f"{found}; {renames} are read by their plain names: {name} as {plain}"


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return ", ".join(listed[:MAX_LISTED]) + more


def _check_base_copies(
    checklist: Checklist, assignment: TensorAssignment, weights: OpenFile, base: BaseModel
) -> None:
    entries = sorted((entry.name, entry.nbytes) for _, entry in assignment.base_copies)
    found = f"{', '.join(name for name, _ in entries)}: {sum(nbytes for _, nbytes in entries)} bytes"
    passed = f"{found} equal the base model's own, which are used" if entries else "the file holds none"
    warning = f"{found} cannot be compared; the base model's own weights are used instead of this copy"
    problems = copy_problems(weights.descriptor, assignment, base.vocabulary_sha256)
    is_compared = all(path in base.vocabulary_sha256 for path, _ in assignment.base_copies)
    checklist.require("base_copies", problems, passed, "" if is_compared else warning)


def _finite_problems(values: Mapping[str, TensorValues]) -> Iterator[Problem]:
    for name, tensor in values.items():
        if tensor.non_finite:
            yield name, f"holds {tensor.non_finite} values that are NaN or infinite"


def _check_effect(
    checklist: Checklist, lora_pairs: tuple[LoraPair, ...], values: Mapping[str, TensorValues]
) -> None:
    has_effect = any(
        pair.scale and not values[pair.a.name].all_zero and not values[pair.b.name].all_zero
        for pair in lora_pairs
    )
    warning = "" if has_effect else "in every module A, B or alpha is zero: the adapter changes nothing"
    checklist.require("effect", (), "the adapter changes the base model", warning)
