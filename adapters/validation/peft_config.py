"""`PeftConfig`: adapter_config.json, parsed strictly into the fields that decide an adapter's arithmetic.

Invariant: nothing is matched here. `peft_matching.py` matches names with modules, once, when an upload is validated.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from loraplex.adapters.errors import MalformedJson, PeftConfigRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.validation.peft_fields import refuse_unsupported
from loraplex.adapters.validation.shown import shown
from loraplex.adapters.validation.strict_json import parse_json

ALL_LINEAR: Final = "all-linear"
DEFAULT_RANK: Final = 8
DEFAULT_ALPHA: Final = 8
DEFAULT_TARGETS: Final = frozenset({"q_proj", "v_proj"})
"""PEFT's own defaults; the targets are those of every architecture that is served."""
MAX_ALPHA: Final = 1e6
MAX_NAMES: Final = 4096
MAX_NAME_LENGTH: Final = 512
MAX_EXPRESSION_LENGTH: Final = 4096
MAX_LAYER: Final = 1023
_NOT_OF_PARAMETERS: Final = ("rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform")
_FILE: Final = "adapter_config.json"
_LAYERS: Final = frozenset({"layers", "model.layers"})
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """`target_modules` None means every projection of every layer ("all-linear"), a string is a regular expression.

    Patterns keep the order of the file, because the first key that matches a module decides. `tensor_names` is in canonical
    configurations only (`tensor_names.py`); `match_tensors` checks it. `defaults` names what the file left out.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: frozenset[str] | str | None
    exclude_modules: frozenset[str] | str = frozenset()
    layers_to_transform: frozenset[int] | None = None
    ensure_weight_tying: bool = False
    modules_to_save: frozenset[str] = frozenset()
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    base_model: str | None = field(default=None, compare=False)
    defaults: tuple[str, ...] = field(default=(), compare=False)

    def document(self) -> dict[str, object]:
        """Return the fields that matter as a PEFT configuration; patterns keep their own order."""
        layers, targets, excluded = self.layers_to_transform, self.target_modules, self.exclude_modules
        names = {"tensor_names": dict(sorted(self.tensor_names.items()))} if self.tensor_names else {}
        return {
            "alpha_pattern": dict(self.alpha_pattern),
            "exclude_modules": (excluded if isinstance(excluded, str) else sorted(excluded)) or None,
            "layers_to_transform": None if layers is None else sorted(layers),
            "lora_alpha": self.alpha,
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": dict(self.rank_pattern),
            **names,
            "target_modules": sorted(targets) if isinstance(targets, frozenset) else targets or ALL_LINEAR,
            "use_rslora": self.use_rslora,
        }

    def canonical(self) -> bytes:
        """Return `document` as bytes that depend on its meaning alone and parse to an equal configuration."""
        return json.dumps(self.document(), separators=(",", ":"), allow_nan=False).encode()


def parse_manifest(data: bytes, limits: AdapterLimits) -> PeftConfig:
    """Raises `PeftConfigRejected` with the field and what is allowed."""
    if len(data) > limits.max_config_bytes:
        raise PeftConfigRejected(_FILE, f"has more than the {limits.max_config_bytes} bytes allowed")
    try:
        document = parse_json(data, max_depth=limits.max_config_depth)
    except MalformedJson as error:
        raise PeftConfigRejected(_FILE, str(error)) from error
    if not isinstance(document, dict):
        raise PeftConfigRejected(_FILE, "must be a JSON object")
    fields = cast(dict[str, object], document)
    tensor_names = cast(dict[str, str], fields.pop("tensor_names", None) or {})
    refuse_unsupported(fields)
    base_model = fields.get("base_model_name_or_path")
    ranks = _pattern(fields, "rank_pattern")
    alphas = _pattern(fields, "alpha_pattern")
    config = PeftConfig(
        rank=_rank("r", fields.get("r", DEFAULT_RANK), limits.max_rank),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha", DEFAULT_ALPHA)),
        use_rslora=_boolean(fields, "use_rslora"),
        rank_pattern={
            key: _rank(f"rank_pattern.{key}", value, limits.max_rank) for key, value in ranks.items()
        },
        alpha_pattern={key: _alpha(f"alpha_pattern.{key}", value) for key, value in alphas.items()},
        target_modules=_targets(fields),
        exclude_modules=_names_or_expression("exclude_modules", fields.get("exclude_modules") or []),
        layers_to_transform=_layers(fields.get("layers_to_transform")),
        ensure_weight_tying=_boolean(fields, "ensure_weight_tying"),
        modules_to_save=_names("modules_to_save", fields.get("modules_to_save") or []),
        tensor_names=tensor_names,
        base_model=base_model if isinstance(base_model, str) else None,
        defaults=_defaults(fields),
    )
    if isinstance(config.target_modules, str) and config.layers_to_transform:
        raise PeftConfigRejected(
            "layers_to_transform", "must be null where target_modules is a regular expression, as in PEFT"
        )
    pattern = fields.get("layers_pattern") or "layers"
    patterns = pattern if isinstance(pattern, list) else [pattern]
    is_plain = all(isinstance(each, str) and _PLAIN.fullmatch(each) for each in patterns)
    if config.layers_to_transform is not None and not (is_plain and _LAYERS & {*patterns}):
        raise PeftConfigRejected(
            "layers_pattern", 'must be names, one of them "layers", which the base model has'
        )
    return config


def _defaults(fields: Mapping[str, object]) -> tuple[str, ...]:
    defaults = [("r", DEFAULT_RANK), ("lora_alpha", DEFAULT_ALPHA)]
    missing = [f"{name} = {value}" for name, value in defaults if name not in fields]
    if fields.get("target_modules") is None and not fields.get("target_parameters"):
        missing.append(f"target_modules = {sorted(DEFAULT_TARGETS)}")
    return tuple(missing)


def _rank(name: str, value: object, max_rank: int) -> int:
    if type(value) is not int or not 1 <= value <= max_rank:
        raise PeftConfigRejected(name, f"must be an integer from 1 to {max_rank}, not {shown(value)}")
    return value


def _alpha(name: str, value: object) -> float:
    if type(value) not in (int, float) or not abs(cast(float, value)) <= MAX_ALPHA:
        raise PeftConfigRejected(
            name, f"must be a number from -{MAX_ALPHA:.0f} to {MAX_ALPHA:.0f}, not {shown(value)}"
        )
    return float(cast(float, value))


def _boolean(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise PeftConfigRejected(name, f"must be true or false, not {shown(value)}")
    return bool(value)


def _pattern(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name) or {}
    if not isinstance(value, dict) or len(value) > MAX_NAMES:
        raise PeftConfigRejected(name, f"must be an object of at most {MAX_NAMES} names or expressions")
    for key in value:
        _name(name, key)
    return value


def _targets(fields: Mapping[str, object]) -> frozenset[str] | str | None:
    """The modules of `target_modules`, and those whose weight `target_parameters` names."""
    parameters = _names("target_parameters", fields.get("target_parameters") or [])
    targets = fields.get("target_modules")
    for other in _NOT_OF_PARAMETERS:
        if parameters and fields.get(other) not in (None, {}, []):
            raise PeftConfigRejected(
                other, "must be empty beside target_parameters, where PEFT reads it in another way"
            )
    if parameters and isinstance(targets, str):
        raise PeftConfigRejected(
            "target_parameters", f"needs a list of target_modules beside it, not {shown(targets)}"
        )
    if targets is None:
        targets = [] if parameters else sorted(DEFAULT_TARGETS)
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        return None
    names = _names_or_expression("target_modules", targets)
    if isinstance(names, str):
        return names
    names |= {name.removesuffix(".weight") for name in parameters}
    if not names:
        raise PeftConfigRejected(
            "target_modules", f'must list at least one module name, or be "{ALL_LINEAR}"'
        )
    return names


def _names_or_expression(name: str, value: object) -> frozenset[str] | str:
    return _name(name, value, MAX_EXPRESSION_LENGTH) if isinstance(value, str) else _names(name, value)


def _names(name: str, value: object) -> frozenset[str]:
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise PeftConfigRejected(
            name, f"must be a list of at most {MAX_NAMES} module names, not {shown(value)}"
        )
    return frozenset(_name(name, each) for each in cast(Sequence[object], value))


def _name(name: str, value: object, max_length: int = MAX_NAME_LENGTH) -> str:
    """A name or an expression; more is asked of one that is matched as an expression (`expressions.py`)."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= max_length:
        raise PeftConfigRejected(
            name, f"{shown(value)} must be 1 to {max_length} printable characters, such as q_proj"
        )
    return value


def _layers(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if len(layers) > MAX_LAYER + 1 or not all(
        type(layer) is int and 0 <= layer <= MAX_LAYER for layer in layers
    ):
        raise PeftConfigRejected("layers_to_transform", f"must be layer numbers from 0 to {MAX_LAYER}")
    return frozenset(layers)
