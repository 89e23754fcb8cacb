"""`ModuleMatcher`: which modules an adapter's configuration targets, their ranks and scales, exactly as PEFT matches them.

Names are those that PEFT saw: of a model that was trained without its head, `layers.0.mlp.up_proj`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Final, TypeVar

from loraplex.adapters.target_modules import ATTENTION, AdaptableModule
from loraplex.adapters.validation.expressions import Expressions
from loraplex.adapters.validation.peft_config import PeftConfig

_WORDS: Final = ATTENTION | {
    *("gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"),
    *("language_model", "model", "layers", "self_attn", "mlp"),
}
"""Parts of names that a dot divides wherever they stand in a key."""
_Value = TypeVar("_Value", int, float)
_PLAIN: Final = re.compile(r"[A-Za-z0-9_]+")
_KEY_FRAME: Final = r"(.*\.)?({})$"
_NUMBERS: Final = re.compile(r"[0-9]\.[0-9]")
_VOCABULARY: Final = ("model.embed_tokens", "embed_tokens", "lm_head")


class ModuleMatcher:
    """All matching of one adapter; raises `PeftConfigRejected` when its expressions are wrong or too slow."""

    def __init__(self, config: PeftConfig) -> None:
        self._config = config
        expressions = Expressions()
        self._named = _predicate("target_modules", config.target_modules or frozenset(), expressions)
        self._excluded = _predicate("exclude_modules", config.exclude_modules, expressions)
        self._ranks = PatternKeys("rank_pattern", config.rank_pattern, expressions)
        self._alphas = PatternKeys("alpha_pattern", config.alpha_pattern, expressions)
        self._is_tied = config.ensure_weight_tying and any(map(self._named, _VOCABULARY))
        self.is_literal = not expressions.count and not self._is_tied
        """Whether the configuration holds the names of all its targets."""

    def targets(self, name: str, module: AdaptableModule) -> bool:
        """Return whether PEFT would put LoRA on `module`, which it saw under `name`. It ties before it excludes."""
        if self._is_tied and module.layer is None:
            return True
        if self._excluded(name) or not self._config.modules_to_save.isdisjoint(endings_of(name)):
            return False
        targets, layers = self._config.target_modules, self._config.layers_to_transform
        if targets is None:
            return module.layer is not None
        # A whole name in the list counts in every layer; an expression has no `layers_to_transform`.
        return self._named(name) and (layers is None or module.layer in layers or name in targets)

    def rank_of(self, name: str) -> int:
        return self._config.rank_pattern.get(self._ranks.first(name), self._config.rank)

    def alpha_of(self, name: str) -> float:
        return self._config.alpha_pattern.get(self._alphas.first(name), self._config.alpha)

    def scale_of(self, name: str) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) with rank stabilisation (arXiv 2312.03732)."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self._config.use_rslora else rank)

    def unused_keys(self, names: Iterable[str]) -> list[str]:
        """Return the keys of both patterns that decide for none of the modules."""
        names = list(names)
        return [f"{keys.field}.{key}" for keys in (self._ranks, self._alphas) for key in keys.unused(names)]


class PatternKeys:
    """The keys of `rank_pattern` or `alpha_pattern`: the first that matches a name decides.

    A key of plain names matches exactly the names that end in it, so only other keys run as expressions: `q.proj` matches q_proj.
    """

    def __init__(self, field: str, pattern: Mapping[str, object], expressions: Expressions) -> None:
        self.field = field
        self._keys = list(pattern)
        self._literal: dict[str, int] = {}
        self._expressions: list[tuple[int, Callable[[str], bool]]] = []
        for position, key in enumerate(self._keys):
            if (literal := _literal(key)) is not None:
                self._literal.setdefault(literal, position)
            else:
                self._expressions.append((position, expressions.compile(field, key, _KEY_FRAME)))
        self.first: Callable[[str], str] = cache(self._first)
        """The key that decides for a name; "" where none does."""

    def unused(self, names: Iterable[str]) -> list[str]:
        used = {self.first(name) for name in names}
        return [key for key in self._keys if key not in used]

    def _first(self, name: str) -> str:
        found = [self._literal[key] for key in (f"^{name}", *endings_of(name)) if key in self._literal]
        first = min(found, default=len(self._keys))
        for position, matches in self._expressions:
            if position < first and matches(name):
                return self._keys[position]
        return self._keys[first] if found else ""


def _predicate(field: str, names: frozenset[str] | str, expressions: Expressions) -> Callable[[str], bool]:
    """Return whether a list or an expression names a module."""
    if isinstance(names, str):
        return expressions.compile(field, names)
    return lambda name: not names.isdisjoint(endings_of(name))


def resolved(
    config: PeftConfig, matcher: ModuleMatcher, seen: Mapping[str, str], modules: Iterable[str]
) -> PeftConfig:
    """Return an equal configuration of literal names of this base model.

    `seen`: by path, the names of the modules with tensors; `modules`: the paths of all.
    """
    ranks = {path: matcher.rank_of(name) for path, name in seen.items()}
    alphas = {path: matcher.alpha_of(name) for path, name in seen.items()}
    return replace(
        config,
        target_modules=frozenset(short_names(seen, modules)),
        ensure_weight_tying=False,
        exclude_modules=frozenset(),
        layers_to_transform=None,
        rank_pattern={k: v for k, v in _shortened(ranks, seen).items() if v != config.rank},
        alpha_pattern={k: v for k, v in _shortened(alphas, seen).items() if v != config.alpha},
    )


def endings_of(path: str) -> tuple[str, ...]:
    """Return every literal name that PEFT matches with this module: the path and its last parts."""
    parts = path.split(".")
    return tuple(".".join(parts[start:]) for start in range(len(parts)))


def short_names(paths: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the literal list that targets exactly these of the base model's modules."""
    return sorted(_shortened(dict.fromkeys(paths, True), modules))


def _shortened(values: Mapping[str, _Value], paths: Iterable[str]) -> dict[str, _Value]:
    """Name modules by their last part where all of `paths` with that part have one value, else by their path."""
    kinds: dict[str, set[_Value | None]] = {}
    for path in paths:
        kinds.setdefault(path.rpartition(".")[2], set()).add(values.get(path))
    return {
        path if len(kinds[kind := path.rpartition(".")[2]]) > 1 else kind: value
        for path, value in sorted(values.items())
    }


def _literal(key: str) -> str | None:
    """Return the key as a plain name, with `^` in front where it names a whole path; None where it must run."""
    literal = key.removesuffix("$").replace("\\.", ".")
    parts = literal.removeprefix("^").split(".")
    # A dot between two digits may stand for a digit.
    known = all(part in _WORDS or part.isdecimal() for part in parts) and not _NUMBERS.search(literal)
    return literal if known or (len(parts) == 1 and _PLAIN.fullmatch(parts[0])) else None
