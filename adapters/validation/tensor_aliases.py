"""PEFT's plain name for each tensor of a file whose names have the marks of known wrappers.

Invariant: the file is never rewritten. A table of the names that differ is part of the adapter's stored configuration, so
that a later version of these rules reads a stored adapter as it was validated. Layers share a row: their number is `*` in it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.tensor_names import HALVES, PREFIX, TRAINING_ONLY, Problem

WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Of torch.compile, FSDP and activation checkpoints; `module` of DDP stands in front only."""
MAX_ROWS: Final = 128
_DDP: Final = "module"
_MULTIMODAL: Final = "language_model"
_SAVED: Final = "modules_to_save"
_ANY_LAYER: Final = "*"
_ENDS: Final = frozenset({*HALVES, TRAINING_ONLY, "base_layer", "weight", _SAVED})
_PLAIN_ENDINGS: Final = frozenset(
    {
        *("weight", "base_layer.weight", TRAINING_ONLY, "lora_embedding_A", "lora_embedding_B"),
        *("lora_A.weight", "lora_B.weight"),
    }
)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """`canonical`: the plain name of each tensor. `seen`: by module path, the name under which PEFT saw the module.

    `table`: the rows where they differ.
    """

    canonical: Mapping[str, str]
    seen: Mapping[str, str]
    table: Mapping[str, str]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Alias:
    """`adapter` is the adapter's name in PEFT where the tensor's name has it."""

    canonical: str
    path: str
    seen: str
    adapter: str | None


def plain_names(names: Iterable[str], modules: Mapping[str, AdaptableModule]) -> TensorNames:
    """Return the plain names; one that belongs to no module stays as it is, and is refused by `assign_tensors`."""
    canonical: dict[str, str] = {}
    sources: dict[str, str] = {}
    seen: dict[str, str] = {}
    table: dict[str, str] = {}
    adapters: set[str] = set()
    problems: list[Problem] = []
    for name in names:
        alias = _alias(name, modules)
        canonical[name] = plain = name if alias is None else alias.canonical
        other = sources.setdefault(plain, name)
        if other != name:
            problems.append((name, f"is the same tensor as {other}: {plain}"))
        if alias is None:
            continue
        if seen.setdefault(alias.path, alias.seen) != alias.seen:
            problems.append((name, f"names the module {alias.path} in another way than its other tensors"))
        adapters.update(() if alias.adapter is None else (alias.adapter,))
        if plain != name:
            table[_row(name)[0]] = _row(plain)[0]
    if len(adapters) > 1:
        shown = ", ".join(sorted(adapters)[:4])
        problems.append(
            (next(iter(canonical)), f"the file holds {len(adapters)} adapters ({shown}); save one")
        )
    if len(table) > MAX_ROWS:
        problems.append(
            (
                next(iter(table)),
                f"names differ from PEFT's in more than {MAX_ROWS} ways; save the unwrapped model",
            )
        )
    return TensorNames(canonical, seen, table, tuple(problems))


def renamed(name: str, table: Mapping[str, str]) -> str:
    """Return the plain name of a stored tensor."""
    row, layer = _row(name)
    return table[row].replace(_ANY_LAYER, layer) if row in table else name


def _row(name: str) -> tuple[str, str]:
    """Return the name with `*` in place of the number of its layer, and the number."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isascii() and part.isdecimal()), None)
    if index is None:
        return name, ""
    return ".".join((*parts[:index], _ANY_LAYER, *parts[index + 1 :])), parts[index]


def _alias(name: str, modules: Mapping[str, AdaptableModule]) -> _Alias | None:
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[:1] == [_DDP]:
        parts = parts[1:]
    if parts[:2] == PREFIX.split(".")[:2]:
        parts = parts[2:]
    end = next((i for i, part in enumerate(parts) if part in _ENDS), None)
    if end is None:
        return None
    rest, adapter = _ending(parts[end:])
    path = _module_path(parts[:end], modules)
    if rest is None or path is None:
        return None
    return _Alias(f"{PREFIX}{path}.{rest}", path, ".".join(parts[:end]), adapter)


def _ending(parts: list[str]) -> tuple[str | None, str | None]:
    """Return what follows the module, without the adapter's name, and that name."""
    adapter = None
    if parts[0] in HALVES or parts[0] in (TRAINING_ONLY, _SAVED):
        has_weight = parts[-1] == "weight"
        if len(parts) == 2 + has_weight:
            adapter = parts.pop(1)
    ending = ".".join(parts)
    if ending == f"{_SAVED}.weight":
        ending = "weight"
    return (ending if ending in _PLAIN_ENDINGS else None), adapter


def _module_path(parts: list[str], modules: Mapping[str, AdaptableModule]) -> str | None:
    """The module of this name, also in a model of text and images, or in a model without its head."""
    text = [part for part in parts if part != _MULTIMODAL]
    names = (".".join(parts), ".".join(text), ".".join(("model", *text)))
    return next((name for name in names if name in modules), None)
