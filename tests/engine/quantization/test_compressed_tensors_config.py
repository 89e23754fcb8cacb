"""`quantization_config`: which fields are read, and that everything else is refused by name."""

import copy
from typing import Any

import pytest

from loraplex.engine.errors import ModelError
from loraplex.engine.quantization.checkpoint_format import LINEAR, Sharing, StoredWeight
from loraplex.engine.quantization.compressed_tensors_config import stored_weights

CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
                "dynamic": False,
                "actorder": "weight",
                "observer": "minmax",
                "observer_kwargs": {},
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "format": "pack-quantized",
    "global_compression_ratio": 1.7,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
    "transform_config": {},
    "version": "0.20.0",
}
WEIGHTS = ("config_groups", "group_0", "weights")
ROWS = {"num_bits": 8, "strategy": "token", "dynamic": True}


def changed(*changes: tuple[tuple[str, ...], Any]) -> dict[str, Any]:
    """The configuration with other values at the given paths."""
    values = copy.deepcopy(CONFIG)
    for path, value in changes:
        at = values
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
    return values


def scheme(*changes: tuple[tuple[str, ...], Any]) -> StoredWeight:
    return stored_weights(changed(*changes)).targets["Linear"]


def test_packed_groups() -> None:
    assert scheme() == StoredWeight(
        num_bits=4, is_float=False, is_packed=True, sharing=Sharing.GROUP, group_size=128, symmetric=True
    )


@pytest.mark.parametrize(
    ("strategy", "group_size", "sharing"),
    [
        (None, None, Sharing.TENSOR),
        (None, -1, Sharing.CHANNEL),
        (None, 64, Sharing.GROUP),
        ("tensor", None, Sharing.TENSOR),
        ("channel", None, Sharing.CHANNEL),
        ("channel", -1, Sharing.CHANNEL),
    ],
)
def test_a_strategy_is_named_or_follows_from_the_group_size(
    strategy: str | None, group_size: int | None, sharing: Sharing
) -> None:
    stored = scheme(((*WEIGHTS, "strategy"), strategy), ((*WEIGHTS, "group_size"), group_size))
    assert (stored.sharing, stored.group_size) == (sharing, 64 if group_size == 64 else None)


def test_a_group_names_its_format_where_they_are_mixed() -> None:
    """Integers of 4 bits with a head of 8, as `loraplex quantize` writes them."""
    head = {
        "targets": ["lm_head"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": ROWS,
        "format": "int-quantized",
    }
    stored = stored_weights(
        changed(
            (("format",), "mixed-precision"),
            (("ignore",), []),
            (("config_groups", "group_0", "format"), "pack-quantized"),
            (("config_groups", "head"), head),
        )
    )
    found = stored.of([("model.layers.0.mlp.up_proj", LINEAR), ("lm_head", LINEAR)])
    assert [(weight.num_bits, weight.is_packed) for weight in found.values()] == [(4, True), (8, False)]


FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT8 = {"num_bits": 8, "strategy": "channel"}


@pytest.mark.parametrize(
    ("weights", "form", "packed"),
    [
        (FLOAT, "float-quantized", False),
        (FLOAT, "naive-quantized", False),
        (INT8, "int-quantized", False),
        (INT8, "naive-quantized", False),
        (INT8, "pack-quantized", True),
    ],
)
def test_formats(weights: dict[str, Any], form: str, packed: bool) -> None:
    stored = scheme((WEIGHTS, weights), (("format",), form))
    assert (stored.is_float, stored.is_packed) == (weights is FLOAT, packed)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("quant_method",),
            "awq",
            "'quantization_config.quant_method' must be 'compressed-tensors', got 'awq'",
        ),
        (("quant_method",), None, "quant_method' must be 'compressed-tensors', got None"),
        (("quantization_status",), "frozen", "quantization_status' must be 'compressed', got 'frozen'"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme' must be null"),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparsity_config.format' must be 'dense'"),
        (("transform_config",), {"config_groups": {"R1": {}}}, "transform_config' must be empty"),
        (("moe_sparsity_config",), {"method": "prune"}, "moe_sparsity_config' must be empty"),
        (("format",), "marlin-24", "format' must be one of int-quantized, naive-quantized, pack-quantized"),
        (("format",), "mixed-precision", "pack-quantized for config_groups.group_0, got 'mixed-precision'"),
        (("format",), "float-quantized", "format' must be one of int-quantized"),
        (("config_groups",), {"W4A16": ["Linear"]}, "Expected `object`, got `array`"),
        (("config_groups", "group_0", "targets"), "Linear", "Expected `array`, got `str`"),
        (("config_groups", "group_0", "weights"), None, "Expected `object`, got `null`"),
        (("config_groups", "group_0", "output_activations"), ROWS, "output_activations' must be null"),
        (("config_groups", "group_0", "input_activations"), ROWS | {"dynamic": False}, "static scales"),
        (("config_groups", "group_0", "input_activations"), ROWS | {"dynamic": "local"}, "static scales"),
        (("config_groups", "group_0", "input_activations"), ROWS | {"num_bits": 4}, "got '4 bits per token'"),
        (("config_groups", "group_0", "input_activations"), ROWS | {"strategy": "group"}, "8 bits per group"),
        ((*WEIGHTS, "num_bits"), 3, "weights.num_bits' must be 8, or 4 for integers, got 3"),
        ((*WEIGHTS, "num_bits"), True, "Expected `int`, got `bool`"),
        ((*WEIGHTS, "type"), "posit", "weights.type' must be 'int' or 'float', got 'posit'"),
        ((*WEIGHTS, "type"), "float", "weights.num_bits' must be 8"),
        (
            (*WEIGHTS, "strategy"),
            "block",
            "weights.strategy' must be one of tensor, channel, group, got 'block'",
        ),
        ((*WEIGHTS, "block_structure"), [128, 128], "weights.block_structure' must be null"),
        ((*WEIGHTS, "group_size"), 16, "weights.group_size' must be a multiple of 32, got 16"),
        ((*WEIGHTS, "group_size"), 0, "weights.group_size' must be a multiple of 32, got 0"),
        ((*WEIGHTS, "group_size"), None, "weights.group_size' must be a multiple of 32, got None"),
        ((*WEIGHTS, "dynamic"), True, "weights.dynamic' must be false"),
        ((*WEIGHTS, "actorder"), "group", "weights.actorder' must be null or 'weight'"),
        ((*WEIGHTS, "actorder"), True, "weights.actorder' must be null or 'weight'"),
        ((*WEIGHTS, "scale_dtype"), "torch.uint8", "weights.scale_dtype' must be a float of 16 or 32 bits"),
        ((*WEIGHTS, "rotation"), "hadamard", "unknown field `rotation`"),
        (("config_groups", "group_0", "kernel"), "x", "unknown field `kernel`"),
        (("compression",), "zip", "unknown field `compression`"),
        (
            WEIGHTS,
            FLOAT | {"strategy": "group", "group_size": 32},
            "must be one of tensor, channel, got 'group'",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(path: tuple[str, ...], value: object, message: str) -> None:
    changes = [(path, value)]
    if isinstance(value, dict) and value.get("type") == "float":
        changes.append((("format",), "float-quantized"))
    with pytest.raises(ModelError) as caught:
        stored_weights(changed(*changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "weights",
    [
        INT8 | {"symmetric": False},
        FLOAT | {"symmetric": False},
        {"num_bits": 4, "strategy": "tensor", "symmetric": False},
    ],
)
def test_zero_points_are_for_four_bits(weights: dict[str, Any]) -> None:
    form = "float-quantized" if weights.get("type") == "float" else "int-quantized"
    with pytest.raises(
        ModelError, match="weights.symmetric' must be true, but for 4 bits per channel or group"
    ):
        scheme((WEIGHTS, weights), (("format",), form))


@pytest.mark.parametrize("values", [None, [], "compressed-tensors", {}, {"quant_method": []}])
def test_what_is_no_configuration_is_refused(values: object) -> None:
    with pytest.raises(ModelError, match="quant_method"):
        stored_weights(values)
