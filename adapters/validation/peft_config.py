"""`PeftConfig`: adapter_config.json, parsed strictly into the fields that decide an adapter's arithmetic.

Invariant: each key is read, harmless or refused by name; an unknown key must be empty, since it may change what the
adapter computes. Module names are literal dotted names and never run as regular expressions.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from loraplex.adapters.errors import MalformedJson, PeftConfigRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.strict_json import parse_json

READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
    }
)

# None of these changes the arithmetic. PEFT imports the class that `auto_mapping` names; nothing here reads it.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)

REFUSED = {
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing among adapters is not supported",
    "corda_config": "CorDA changes the base weights; convert the adapter to plain LoRA before saving it",
    "ensure_weight_tying": "tied adapters are not supported",
    "fan_in_fan_out": "must be false: the base model has no Conv1D",
    "kasa_config": "KaSA is not supported",
    "layer_replication": "replicated layers are not supported",
    "loftq_config": "LoftQ changes the base weights; convert the adapter to plain LoRA before saving it",
    "lora_bias": "biases of LoRA modules are not supported",
    "lora_ga_config": "LoRA-GA changes the base weights; convert the adapter to plain LoRA before saving it",
    "megatron_config": "Megatron layers are not supported",
    "modules_to_save": "whole trained modules are not supported, only low-rank ones",
    "monteclora_config": "MonteCLoRA is not supported",
    "target_parameters": "adapters on bare parameters are not supported",
    "trainable_token_indices": "trained single tokens are not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_dora": "DoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "velora_config": "VeLoRA is not supported",
}

# Other initialisations move a part of the base weights into the adapter, which then does not fit the unchanged base model.
PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


ALL_LINEAR = "all-linear"
MAX_ALPHA = 1e6
MAX_NAMES = 4096
MAX_LAYER = 1023
_FILE = "adapter_config.json"
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}(\.[A-Za-z0-9_]{1,64}){0,15}")
_EMPTY: tuple[object, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """`target_modules` None means every projection of every layer ("all-linear").

    Patterns keep the order of the file, because the first key that matches a module decides.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: frozenset[str] | None
    exclude_modules: frozenset[str] = frozenset()
    layers_to_transform: frozenset[int] | None = None

    def targets(self, module: AdaptableModule) -> bool:
        """Return whether PEFT would put LoRA on this module."""
        endings = endings_of(module.path)
        if not self.exclude_modules.isdisjoint(endings):
            return False
        if self.target_modules is None:
            return module.layer is not None
        if module.path in self.target_modules:
            return True
        if self.layers_to_transform is not None and module.layer not in self.layers_to_transform:
            return False
        return not self.target_modules.isdisjoint(endings)

    def rank_of(self, path: str) -> int:
        key = _first_match(self.rank_pattern, path)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, path: str) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) with rank stabilisation (arXiv 2312.03732)."""
        key = _first_match(self.alpha_pattern, path)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        rank = self.rank_of(path)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def document(self) -> dict[str, object]:
        """Return the fields that matter as a PEFT configuration; patterns keep their own order."""
        layers, targets = self.layers_to_transform, self.target_modules
        return {
            "alpha_pattern": dict(self.alpha_pattern),
            "exclude_modules": sorted(self.exclude_modules) or None,
            "layers_to_transform": None if layers is None else sorted(layers),
            "lora_alpha": self.alpha,
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": dict(self.rank_pattern),
            "target_modules": ALL_LINEAR if targets is None else sorted(targets),
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
    _refuse_unsupported(fields)
    ranks = _pattern(fields, "rank_pattern")
    alphas = _pattern(fields, "alpha_pattern")
    return PeftConfig(
        rank=_rank("r", fields.get("r"), limits.max_rank),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha")),
        use_rslora=_boolean("use_rslora", fields.get("use_rslora", False)),
        rank_pattern={
            key: _rank(f"rank_pattern.{key}", value, limits.max_rank) for key, value in ranks.items()
        },
        alpha_pattern={key: _alpha(f"alpha_pattern.{key}", value) for key, value in alphas.items()},
        target_modules=_target_modules(fields.get("target_modules")),
        exclude_modules=_names("exclude_modules", fields.get("exclude_modules") or []),
        layers_to_transform=_layers(fields.get("layers_to_transform")),
    )


def endings_of(path: str) -> tuple[str, ...]:
    """Return every literal name that PEFT matches with this module: the path and its last parts."""
    parts = path.split(".")
    return tuple(".".join(parts[start:]) for start in range(len(parts)))


def pattern_keys_of(path: str) -> tuple[str, ...]:
    """Return every literal pattern key that matches this module; a leading `^` matches the whole path only."""
    return (f"^{path}", *endings_of(path))


def _first_match(pattern: Mapping[str, object], path: str) -> str | None:
    matches = [key for key in pattern_keys_of(path) if key in pattern]
    return min(matches, key=list(pattern).index) if len(matches) > 1 else next(iter(matches), None)


def _refuse_unsupported(fields: Mapping[str, object]) -> None:
    if fields.get("peft_type") != "LORA":
        raise PeftConfigRejected("peft_type", f'must be "LORA", not {_shown(fields.get("peft_type"))}')
    if fields.get("bias", "none") != "none":
        raise PeftConfigRejected("bias", f'must be "none", not {_shown(fields["bias"])}')
    if fields.get("init_lora_weights") not in PLAIN_INITIALISATIONS:
        shown = _shown(fields["init_lora_weights"])
        raise PeftConfigRejected(
            "init_lora_weights",
            f"{shown} changes the base weights; convert the adapter to plain LoRA before saving it",
        )
    if fields.get("layers_pattern") not in (*_EMPTY, "layers", ["layers"]):
        raise PeftConfigRejected("layers_pattern", 'must be null or "layers"')
    for key, value in fields.items():
        if key in READ or key in HARMLESS or key == "bias" or value in _EMPTY:
            continue
        raise PeftConfigRejected(
            key if key in REFUSED else _shown(key),
            REFUSED.get(key, "is not a known field of a LoRA configuration"),
        )


def _rank(field: str, value: object, max_rank: int) -> int:
    if type(value) is not int or not 1 <= value <= max_rank:
        raise PeftConfigRejected(field, f"must be an integer from 1 to {max_rank}, not {_shown(value)}")
    return value


def _alpha(field: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < cast(float, value) <= MAX_ALPHA:
        raise PeftConfigRejected(
            field, f"must be a number above 0 and at most {MAX_ALPHA:.0f}, not {_shown(value)}"
        )
    return float(cast(float, value))


def _boolean(field: str, value: object) -> bool:
    if type(value) is not bool:
        raise PeftConfigRejected(field, f"must be true or false, not {_shown(value)}")
    return value


def _pattern(fields: Mapping[str, object], field: str) -> Mapping[str, object]:
    value = fields.get(field) or {}
    if not isinstance(value, dict) or len(value) > MAX_NAMES:
        raise PeftConfigRejected(field, f"must be an object of at most {MAX_NAMES} module names")
    for key in value:
        _name(field, key.removeprefix("^"))
    return value


def _target_modules(value: object) -> frozenset[str] | None:
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        return None
    if isinstance(value, str):
        raise PeftConfigRejected(
            "target_modules",
            f'the regular expression {_shown(value)} is refused; list the names, or "{ALL_LINEAR}"',
        )
    names = _names("target_modules", value)
    if not names:
        raise PeftConfigRejected(
            "target_modules", f'must list at least one module name, or be "{ALL_LINEAR}"'
        )
    return names


def _names(field: str, value: object) -> frozenset[str]:
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise PeftConfigRejected(
            field, f"must be a list of at most {MAX_NAMES} module names, not {_shown(value)}"
        )
    return frozenset(_name(field, name) for name in cast(Sequence[object], value))


def _name(field: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise PeftConfigRejected(
            field, f"{_shown(value)} is not a literal module name such as q_proj or layers.3.mlp.up_proj"
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


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
