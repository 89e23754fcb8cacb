"""Assigns each tensor of the file to a half of a module's LoRA by PEFT's names; any other tensor is refused by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.peft_config import PeftConfig, endings_of, pattern_keys_of
from loraplex.adapters.validation.safetensors_header import TensorEntry

PREFIX = "base_model.model."
BASE_COPY = ".base_layer.weight"
_LINEAR_HALVES = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING_HALVES = (".lora_embedding_A", ".lora_embedding_B")
_REFUSED_PARTS = {
    "lora_magnitude_vector": "DoRA is not supported",
    "modules_to_save": "whole trained modules (modules_to_save) are not supported",
    "original_module": "whole trained modules (modules_to_save) are not supported",
    "trainable_tokens_delta": "trained single tokens are not supported",
    "token_adapter": "trained single tokens are not supported",
    "bias": "biases are not supported",
}

Problem = tuple[str, str]
"""(the tensor, module or field, what is wrong with it)"""


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
    """The file's tensors by their role. A module is in `a` or `b` under its path."""

    modules: Mapping[str, AdaptableModule]
    a: Mapping[str, TensorEntry]
    b: Mapping[str, TensorEntry]
    base_copies: Mapping[str, TensorEntry]
    unknown: tuple[Problem, ...]

    @property
    def paths(self) -> frozenset[str]:
        return frozenset((*self.a, *self.b))


def assign_tensors(
    header: Mapping[str, TensorEntry], modules: Mapping[str, AdaptableModule]
) -> TensorAssignment:
    halves: tuple[dict[str, TensorEntry], dict[str, TensorEntry]] = ({}, {})
    base_copies: dict[str, TensorEntry] = {}
    unknown: list[Problem] = []
    for name, entry in header.items():
        path, half = _split(name, modules)
        if path is not None and half is not None:
            halves[half][path] = entry
        elif path is not None:
            base_copies[path] = entry
        else:
            unknown.append((name, _why_unknown(name, modules)))
    return TensorAssignment(modules, *halves, base_copies, tuple(unknown))


def target_problems(manifest: PeftConfig, assignment: TensorAssignment) -> Iterator[Problem]:
    """The targeted modules and those with tensors must be the same."""
    known = {ending for path in assignment.modules for ending in endings_of(path)}
    for name in sorted((manifest.target_modules or frozenset()) - known):
        yield name, "target_modules names it, but the base model has no such module"
    present = assignment.paths
    for path, module in assignment.modules.items():
        targeted = manifest.targets(module)
        if targeted and path not in present:
            yield path, "target_modules names it, but the file holds no tensor for it"
        if path in present and not targeted:
            yield path, "the file holds tensors for it, but target_modules does not name it"


def pattern_problems(manifest: PeftConfig, assignment: TensorAssignment) -> Iterator[Problem]:
    known = {key for path in assignment.paths for key in pattern_keys_of(path)}
    for field, pattern in (
        ("rank_pattern", manifest.rank_pattern),
        ("alpha_pattern", manifest.alpha_pattern),
    ):
        for key in pattern:
            if key not in known:
                yield f"{field}.{key}", "matches no targeted module"


def pair_problems(assignment: TensorAssignment) -> Iterator[Problem]:
    for path in sorted(assignment.paths):
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


def rank_problems(manifest: PeftConfig, assignment: TensorAssignment) -> Iterator[Problem]:
    for entries, axis in ((assignment.a, 0), (assignment.b, 1)):
        for path, entry in entries.items():
            rank = manifest.rank_of(path)
            if entry.shape[axis] != rank:
                yield entry.name, f"has the rank {entry.shape[axis]}, adapter_config.json says {rank}"


def base_copy_problems(assignment: TensorAssignment) -> Iterator[Problem]:
    """Check copies of the vocabulary's rows that PEFT stores with LoRA on the embedding or the head: [vocab, hidden]."""
    for path, entry in assignment.base_copies.items():
        module = assignment.modules[path]
        expected = [module.in_features, module.out_features]
        if not module.is_embedding:
            expected.reverse()
        if list(entry.shape) != expected:
            yield entry.name, f"must have the base model's shape {expected}, not {list(entry.shape)}"
        if path not in assignment.paths:
            yield entry.name, "is a copy of base weights without a LoRA beside it"


def pairs(manifest: PeftConfig, assignment: TensorAssignment) -> tuple[LoraPair, ...]:
    """Return the pairs, once every check above has passed."""
    return tuple(
        LoraPair(
            module=assignment.modules[path],
            rank=manifest.rank_of(path),
            scale=manifest.scale_of(path),
            a=assignment.a[path],
            b=assignment.b[path],
        )
        for path in sorted(assignment.paths)
    )


def _split(name: str, modules: Mapping[str, AdaptableModule]) -> tuple[str | None, int | None]:
    """Return the module's path and half (0 for A, 1 for B; None for a copy of base weights)."""
    if not name.startswith(PREFIX):
        return None, None
    for halves, embedding in ((_LINEAR_HALVES, False), (_EMBEDDING_HALVES, True)):
        for half, suffix in enumerate(halves):
            module = modules.get(name[len(PREFIX) : -len(suffix)]) if name.endswith(suffix) else None
            if module is not None and module.is_embedding == embedding:
                return module.path, half
    module = modules.get(name[len(PREFIX) : -len(BASE_COPY)]) if name.endswith(BASE_COPY) else None
    return (module.path if module is not None and module.layer is None else None), None


def _why_unknown(name: str, modules: Mapping[str, AdaptableModule]) -> str:
    parts = name.split(".")
    for part, reason in _REFUSED_PARTS.items():
        if part in parts:
            return reason
    if name.startswith(PREFIX) and name[len(PREFIX) :].removesuffix(".weight") in modules:
        return "whole trained modules (modules_to_save) are not supported"
    if name.startswith(f"{PREFIX}model.embed_tokens.lora_"):
        return "LoRA on the embedding is named lora_embedding_A and lora_embedding_B"
    return f"matches no module of the base model; names look like {PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
