"""Assigns each tensor of the file to a half of a module's LoRA by PEFT's names; any other tensor is refused by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loraplex.adapters.errors import Problem
from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.peft_config import PeftConfig
from loraplex.adapters.validation.peft_matching import ModuleMatcher, endings_of
from loraplex.adapters.validation.safetensors_header import TensorEntry
from loraplex.adapters.validation.tensor_names import PREFIX, read_name

_REFUSED_PARTS = {
    "lora_magnitude_vector": "DoRA is not supported: convert it by peft.convert_to_lora, or train with use_dora=False",
    "modules_to_save": "whole trained modules (modules_to_save) are not supported",
    "original_module": "whole trained modules (modules_to_save) are not supported",
    "trainable_tokens_delta": "trained single tokens are not supported",
    "token_adapter": "trained single tokens are not supported",
    "bias": "biases are not supported; train with bias='none' and lora_bias=False",
    "lora_a": "is in the format of mlx-lm; save the adapter with PEFT",
    "lora_b": "is in the format of mlx-lm; save the adapter with PEFT",
}


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One module's halves, A [rank, in_features] and B [out_features, rank], not yet scaled."""

    module: AdaptableModule
    rank: int
    scale: float
    a: TensorEntry
    b: TensorEntry


@dataclass(frozen=True, slots=True)
class TensorAssignment:
    """The file's tensors by their role; `a` and `b` by their module's path.

    `seen`: by path, the name under which PEFT saw a module of `a` or `b`. `base_copies`: with their module's path.
    """

    modules: Mapping[str, AdaptableModule]
    seen: Mapping[str, str]
    a: Mapping[str, TensorEntry]
    b: Mapping[str, TensorEntry]
    base_copies: tuple[tuple[str, TensorEntry], ...]
    unknown: tuple[Problem, ...]


def assign_tensors(
    header: Mapping[str, TensorEntry], modules: Mapping[str, AdaptableModule], seen: Mapping[str, str]
) -> TensorAssignment:
    """`header`: by plain names; errors name the tensor of the file."""
    halves: dict[str, dict[str, TensorEntry]] = {"A": {}, "B": {}}
    base_copies: list[tuple[str, TensorEntry]] = []
    unknown: list[Problem] = []
    for name, entry in header.items():
        found = read_name(name, modules)
        if found is None or found.plain != name:
            unknown.append((entry.name, _why_unknown(name, modules)))
        elif found.role == "copy":
            base_copies.append((found.module.path, entry))
        elif found.role in halves:
            halves[found.role][found.module.path] = entry
    names = {path: seen.get(path, path) for path in (*halves["A"], *halves["B"])}
    return TensorAssignment(modules, names, halves["A"], halves["B"], tuple(base_copies), tuple(unknown))


def target_problems(matcher: ModuleMatcher, assignment: TensorAssignment) -> Iterator[Problem]:
    """Every module with tensors must be targeted: PEFT drops other tensors silently."""
    if not assignment.seen:
        yield "adapter_model.safetensors", "holds no LoRA tensor"
    for path, name in assignment.seen.items():
        if not matcher.targets(name, assignment.modules[path]):
            yield path, "the file holds tensors for it, but target_modules does not name it: add it there"


def half_tied_problems(assignment: TensorAssignment) -> Iterator[Problem]:
    """On a tied base model, PEFT computes one LoRA for the embedding and the head: a file with half of it is ambiguous."""
    missing = [
        path
        for path, each in assignment.modules.items()
        if each.layer is None and path not in assignment.seen
    ]
    if len(missing) == 1:
        yield missing[0], "the file holds no tensor for it; with ensure_weight_tying save embedding and head"


def targets_without_tensors(
    manifest: PeftConfig, matcher: ModuleMatcher, assignment: TensorAssignment
) -> list[str]:
    """Return the targets that have no tensor: PEFT computes the base model there, so that they change nothing."""
    listed = manifest.target_modules if isinstance(manifest.target_modules, frozenset) else frozenset()
    missing = {
        path: path.rpartition(".")[2]
        for path, module in assignment.modules.items()
        if path not in assignment.seen and matcher.targets(path, module)
    }
    known = {ending for path in assignment.modules for ending in endings_of(path)}
    present = {path.rpartition(".")[2] for path in assignment.seen}
    parts = {kind if kind not in present else path for path, kind in missing.items()}
    return sorted(parts | (listed - known))


def pair_problems(assignment: TensorAssignment) -> Iterator[Problem]:
    for path in sorted(assignment.seen):
        for half, entries in (("A", assignment.a), ("B", assignment.b)):
            if path not in entries:
                yield path, f"the half lora_{half} is missing"


def shape_problems(assignment: TensorAssignment) -> Iterator[Problem]:
    """Check everything about shapes except the rank."""
    for path, entry in assignment.a.items():
        width = assignment.modules[path].in_features
        if len(entry.shape) != 2 or entry.shape[1] != width:
            yield entry.name, f"must have the shape [rank, {width}], not {list(entry.shape)}"
    for path, entry in assignment.b.items():
        height = assignment.modules[path].out_features
        if len(entry.shape) != 2 or entry.shape[0] != height:
            yield entry.name, f"must have the shape [{height}, rank], not {list(entry.shape)}"


def rank_problems(matcher: ModuleMatcher, assignment: TensorAssignment) -> Iterator[Problem]:
    for entries, axis in ((assignment.a, 0), (assignment.b, 1)):
        for path, entry in entries.items():
            rank = matcher.rank_of(assignment.seen[path])
            if entry.shape[axis] != rank:
                yield entry.name, f"has the rank {entry.shape[axis]}, adapter_config.json says {rank}"


def saved_module_problems(manifest: PeftConfig, assignment: TensorAssignment) -> Iterator[Problem]:
    """PEFT loads no file that lacks a module of `modules_to_save`; it passes over names that the model does not have."""
    copied = {ending for path, _ in assignment.base_copies for ending in endings_of(path)}
    known = {part for path in assignment.modules for part in endings_of(path) + tuple(path.split("."))}
    for name in sorted(manifest.modules_to_save - copied):
        if name in known | {"norm", "model.norm"}:
            yield f"modules_to_save.{name}", "the file holds no copy of it, so that its training is lost"
        elif not name.replace("_", "").isalnum():
            yield (
                f"modules_to_save.{name}",
                "must be the name of a module: PEFT runs it as a regular expression",
            )


def pairs(matcher: ModuleMatcher, assignment: TensorAssignment) -> tuple[LoraPair, ...]:
    """Return the pairs, once every check above has passed."""
    return tuple(
        LoraPair(
            module=assignment.modules[path],
            rank=matcher.rank_of(assignment.seen[path]),
            scale=matcher.scale_of(assignment.seen[path]),
            a=assignment.a[path],
            b=assignment.b[path],
        )
        for path in sorted(assignment.seen)
    )


def _why_unknown(name: str, modules: Mapping[str, AdaptableModule]) -> str:
    parts = name.split(".")
    for part, reason in _REFUSED_PARTS.items():
        if part in parts:
            return reason
    if name.removesuffix(".weight").endswith(tuple(modules)):
        return "whole trained modules (modules_to_save) are not supported"
    if "embed_tokens.lora_" in name:
        return "LoRA on the embedding is named lora_embedding_A and lora_embedding_B, with nothing behind"
    return f"matches no module of the base model; names look like {PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
