"""`ModuleMatcher`: which modules an adapter's configuration targets, their ranks and scales, exactly as PEFT matches them.

Names are those that PEFT saw: of a model that was trained without its head, `layers.0.mlp.up_proj`.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from loraplex.adapters.target_modules import ATTENTION, AdaptableModule
from loraplex.adapters.validation.expressions import Expression, MatchBudget
from loraplex.adapters.validation.peft_config import PeftConfig

_PROJECTIONS: Final = ATTENTION | {"gate_proj", "up_proj", "down_proj"}
_PARENTS: Final = frozenset({"language_model", "model", "layers", "self_attn", "mlp"})
_WORDS: Final = _PROJECTIONS | _PARENTS | {"embed_tokens", "lm_head"}
_Value = TypeVar("_Value", int, float)
_PLAIN: Final = re.compile(r"[A-Za-z0-9_]+")
_ANY_LAYERS: Final = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
_KEY_FRAME: Final = r"(.*\.)?({})$"
_LAYER_FRAME: Final = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."


class ModuleMatcher:
    """All matching of one adapter; raises `PeftConfigRejected` when its expressions are wrong or too slow."""

    def __init__(self, config: PeftConfig) -> None:
        self._config = config
        budget = MatchBudget()
        targets, excluded = config.target_modules, config.exclude_modules
        self._target = budget.compile("target_modules", targets) if isinstance(targets, str) else None
        self._excluded = budget.compile("exclude_modules", excluded) if isinstance(excluded, str) else None
        self._layers = [
            budget.compile("layers_pattern", each, _LAYER_FRAME)
            for each in config.layers_pattern
            if config.layers_to_transform is not None
        ]
        self._ranks = PatternKeys("rank_pattern", config.rank_pattern, budget)
        self._alphas = PatternKeys("alpha_pattern", config.alpha_pattern, budget)

    @property
    def is_literal(self) -> bool:
        """Whether the configuration holds names only."""
        expressions = self._target or self._excluded or self._ranks.expressions or self._alphas.expressions
        return (
            not expressions
            and not self._config.ensure_weight_tying
            and all(each.source == "layers" for each in self._layers)
        )

    def targets(self, name: str, module: AdaptableModule) -> bool:
        """Return whether PEFT would put LoRA on `module`, which it saw under `name`."""
        endings = endings_of(name)
        if self._excludes(name, endings) or not self._config.modules_to_save.isdisjoint(endings):
            return False
        targets = self._config.target_modules
        if targets is None:
            return module.layer is not None
        if isinstance(targets, str):
            return self._target is not None and self._target.match(name) is not None
        if name in targets:
            return True
        if self._config.ensure_weight_tying and module.path == "lm_head" and "embed_tokens" in targets:
            return True
        return not targets.isdisjoint(endings) and self._has_layer(name)

    def rank_of(self, name: str) -> int:
        key = self._ranks.first(name)
        return self._config.rank if key is None else self._config.rank_pattern[key]

    def alpha_of(self, name: str) -> float:
        key = self._alphas.first(name)
        return self._config.alpha if key is None else self._config.alpha_pattern[key]

    def scale_of(self, name: str) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) with rank stabilisation (arXiv 2312.03732)."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self._config.use_rslora else rank)

    def unused_keys(self, names: Iterable[str]) -> list[str]:
        """Return the keys of both patterns that decide for none of the modules."""
        names = list(names)
        return [f"{keys.field}.{key}" for keys in (self._ranks, self._alphas) for key in keys.unused(names)]

    def _excludes(self, name: str, endings: tuple[str, ...]) -> bool:
        excluded = self._config.exclude_modules
        if isinstance(excluded, str):
            return self._excluded is not None and self._excluded.match(name) is not None
        return not excluded.isdisjoint(endings)

    def _has_layer(self, name: str) -> bool:
        layers = self._config.layers_to_transform
        if layers is None:
            return True
        patterns: Iterable[Expression | re.Pattern[str]] = self._layers or (_ANY_LAYERS,)
        found = next((match for each in patterns if (match := each.match(name))), None)
        return found is not None and int(found["idx"]) in layers


class PatternKeys:
    """The keys of `rank_pattern` or `alpha_pattern`: the first that matches a name decides.

    A key of plain names matches exactly the names that end in it, so only other keys run as expressions: `q.proj` matches q_proj.
    """

    def __init__(self, field: str, pattern: Mapping[str, object], budget: MatchBudget) -> None:
        self.field = field
        self._keys = list(pattern)
        self._literal: dict[str, int] = {}
        self.expressions: list[tuple[int, Expression]] = []
        self._found: dict[str, str | None] = {}
        for position, key in enumerate(self._keys):
            if (literal := _literal(key)) is not None:
                self._literal.setdefault(literal, position)
            else:
                self.expressions.append((position, budget.compile(field, key, _KEY_FRAME)))

    def first(self, name: str) -> str | None:
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def unused(self, names: Collection[str]) -> list[str]:
        used = {self.first(name) for name in names}
        return [key for key in self._keys if key not in used]

    def _find(self, name: str) -> str | None:
        found = [self._literal[key] for key in (f"^{name}", *endings_of(name)) if key in self._literal]
        first = min(found, default=len(self._keys))
        for position, expression in self.expressions:
            if position < first and expression.match(name) is not None:
                return self._keys[position]
        return self._keys[first] if found else None


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
        exclude_modules=frozenset(),
        layers_to_transform=None,
        layers_pattern=(),
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
    known = all(part in _WORDS or part.isdecimal() for part in parts)
    return literal if known or (len(parts) == 1 and _PLAIN.fullmatch(parts[0])) else None
