"""Reads the name of each tensor of a file, also where it has the marks of known wrappers.

Invariant: the file is never rewritten. A table of the names that differ from PEFT's is part of the adapter's stored
configuration, so that a later version of these rules reads a stored adapter as it was validated. Layers share a row of the
table: their number is `*` in it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from loraplex.adapters.errors import Problem
from loraplex.adapters.target_modules import AdaptableModule

PREFIX: Final = "base_model.model."
WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Of torch.compile, FSDP and activation checkpoints; `module` of DDP stands in front only."""
Role: TypeAlias = Literal["A", "B", "copy", "unused"]
_ROLES: Final[Mapping[str, Role]] = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "weight": "copy",
    "base_layer.weight": "copy",
    # VeLoRA keeps it for its backward pass; the forward pass is plain LoRA.
    "lora_velora_embed": "unused",
}
"""By what follows the module in PEFT's name."""
_SAVED: Final = "modules_to_save"
_ENDS: Final = frozenset({_SAVED, *(ending.partition(".")[0] for ending in _ROLES)})
_MULTIMODAL: Final = "language_model"
_ANY_LAYER: Final = "*"


@dataclass(frozen=True, slots=True)
class TensorName:
    """`seen`: the name under which PEFT saw the module. `adapter`: its name in PEFT, where the tensor's name has it."""

    plain: str
    module: AdaptableModule
    role: Role
    seen: str
    adapter: str | None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """`canonical`: the plain name of each tensor. `seen`: by module path, the name under which PEFT saw the module.

    `table`: the rows where they differ.
    """

    canonical: Mapping[str, str]
    seen: Mapping[str, str]
    table: Mapping[str, str]
    problems: tuple[Problem, ...]


def read_name(name: str, modules: Mapping[str, AdaptableModule]) -> TensorName | None:
    """Return what the tensor is; None if it belongs to no module, or has no role in this one."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[:1] == ["module"]:
        parts = parts[1:]
    if parts[:2] == PREFIX.split(".")[:2]:
        parts = parts[2:]
    end = next((i for i, part in enumerate(parts) if part in _ENDS), len(parts))
    seen, ending = parts[:end], parts[end:]
    adapter = None
    if len(ending) > 1 and ending[0] not in ("weight", "base_layer") and ending[1:] != ["weight"]:
        adapter = ending.pop(1)
    if ending == [_SAVED, "weight"]:
        ending = ["weight"]
    # A model of text and images has the language model inside; a model without its head is the inner `model`.
    text = ".".join(part for part in seen if part != _MULTIMODAL)
    module = modules.get(text) or modules.get(f"model.{text}")
    role = _ROLES.get(".".join(ending))
    if module is None or role is None or not _has_role(module, role, ending[0]):
        return None
    plain = f"{PREFIX}{module.path}.{'.'.join(ending)}"
    return TensorName(plain, module, role, ".".join(seen), adapter)


def plain_names(names: Iterable[str], modules: Mapping[str, AdaptableModule]) -> TensorNames:
    """Return the plain names; one that belongs to no module stays as it is, and is refused by `assign_tensors`."""
    canonical: dict[str, str] = {}
    sources: dict[str, str] = {}
    seen: dict[str, str] = {}
    table: dict[str, str] = {}
    adapters: dict[str, str] = {}
    problems: list[Problem] = []
    for name in names:
        found = read_name(name, modules)
        canonical[name] = plain = name if found is None else found.plain
        other = sources.setdefault(plain, name)
        if other != name:
            problems.append((name, f"is the same tensor as {other}: {plain}"))
        if found is None:
            continue
        path = found.module.path
        if seen.setdefault(path, found.seen) != found.seen:
            problems.append((name, f"names the module {path} in another way than its other tensors"))
        if found.adapter is not None:
            adapters.setdefault(found.adapter, name)
        if plain != name:
            table[_row(name)[0]] = _row(plain)[0]
    if len(adapters) > 1:
        shown = ", ".join(sorted(adapters)[:4])
        problems.append(
            (next(iter(adapters.values())), f"the file holds {len(adapters)} adapters ({shown}); save one")
        )
    return TensorNames(canonical, seen, table, tuple(problems))


def renamed(name: str, table: Mapping[str, str]) -> str:
    """Return the plain name of a stored tensor."""
    row, layer = _row(name)
    return table[row].replace(_ANY_LAYER, layer) if row in table else name


def _has_role(module: AdaptableModule, role: Role, end: str) -> bool:
    if role == "copy":
        return module.layer is None
    return role == "unused" or module.is_embedding == end.startswith("lora_embedding")


def _row(name: str) -> tuple[str, str]:
    """Return the name with `*` in place of the number of its layer, and the number."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isascii() and part.isdecimal()), None)
    if index is None:
        return name, ""
    return ".".join((*parts[:index], _ANY_LAYER, *parts[index + 1 :])), parts[index]
