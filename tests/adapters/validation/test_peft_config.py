"""adapter_config.json: what is read, what is refused and with which field, and the canonical form."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import PeftConfigRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.validation.peft_config import PeftConfig, parse_manifest
from loraplex.adapters.validation.peft_matching import ModuleMatcher, endings_of

LIMITS = AdapterLimits()
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def parse(**changes: Any) -> PeftConfig:
    fields = {key: value for key, value in (PLAIN | changes).items() if value is not ...}
    return parse_manifest(json.dumps(fields).encode(), LIMITS)


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"peft_type": "IA3"}, "peft_type", 'must be "LORA", not "IA3"'),
    ({"peft_type": ...}, "peft_type", "not null"),
    ({"r": 0}, "r", "integer from 1 to 256, not 0"),
    ({"r": 257}, "r", "not 257"),
    ({"r": True}, "r", "not true"),
    ({"r": 8.0}, "r", "not 8.0"),
    ({"r": None}, "r", "not null"),
    ({"lora_alpha": 1e7}, "lora_alpha", "not 10000000.0"),
    ({"lora_alpha": 10**400}, "lora_alpha", "from -1000000 to 1000000"),
    ({"lora_alpha": "16"}, "lora_alpha", 'not "16"'),
    ({"lora_alpha": None}, "lora_alpha", "not null"),
    ({"use_rslora": 1}, "use_rslora", "true or false"),
    ({"use_dora": True}, "use_dora", "DoRA is not supported"),
    ({"lora_bias": True}, "lora_bias", "biases"),
    ({"modules_to_save": "lm_head"}, "modules_to_save", "must be a list"),
    ({"layer_replication": [[0, 4]]}, "layer_replication", "replicated"),
    ({"layers_pattern": {"layers": 1}, "layers_to_transform": 0}, "layers_pattern", 'one of them "layers"'),
    ({"layers_pattern": "h", "layers_to_transform": [0]}, "layers_pattern", 'one of them "layers"'),
    ({"layers_pattern": ["(", "layers"], "layers_to_transform": [0]}, "layers_pattern", "must be names"),
    (
        {"target_parameters": ["q_proj.weight"], "alpha_pattern": {"q_proj": 2}},
        "alpha_pattern",
        "must be empty beside",
    ),
    ({"target_modules": ".*", "layers_to_transform": 0}, "layers_to_transform", "must be null where"),
    ({"layers_to_transform": [-1]}, "layers_to_transform", "from 0 to 1023"),
    ({"layers_to_transform": ["1"]}, "layers_to_transform", "from 0 to 1023"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices", "single tokens"),
    ({"target_parameters": ["q_proj.weight"], "target_modules": ".*"}, "target_parameters", "needs a list"),
    ({"target_modules": ".*", "ensure_weight_tying": "yes"}, "ensure_weight_tying", "must be true or false"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens", "activated LoRA"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights", '"pissa" changes the base weights'),
    ({"init_lora_weights": "olora"}, "init_lora_weights", '"olora" changes the base weights'),
    ({"target_modules": []}, "target_modules", "at least one"),
    ({"target_modules": [1]}, "target_modules", "1 must be 1 to 512 printable"),
    ({"target_modules": ["a\x00b"]}, "target_modules", "printable characters"),
    ({"target_modules": [""]}, "target_modules", "1 to 512"),
    ({"target_modules": ["x" * 513]}, "target_modules", "1 to 512"),
    ({"target_modules": "x" * 4097}, "target_modules", "1 to 4096"),
    ({"target_modules": ["q_proj"] * 4097}, "target_modules", "at most 4096"),
    ({"rank_pattern": [1]}, "rank_pattern", "must be an object"),
    ({"rank_pattern": {str(n): 4 for n in range(4097)}}, "rank_pattern", "at most 4096"),
    ({"rank_pattern": {"q\nproj": 4}}, "rank_pattern", "printable characters"),
    ({"rank_pattern": {"q_proj": 300}}, "rank_pattern.q_proj", "from 1 to 256"),
    ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern.q_proj", "must be a number"),
    ({"future_option": 3}, '"future_option"', "is not a known field"),
    ({"\ud800\x1b": 3}, '"\\ud800\\u001b"', "is not a known field"),
]


@pytest.mark.parametrize(("changes", "field", "message"), BAD_FIELDS, ids=lambda case: str(case)[:40])
def test_bad_fields_are_refused_by_name(changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(PeftConfigRejected) as caught:
        parse(**changes)
    assert (caught.value.check, caught.value.field) == ("manifest", field)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b"[]", "must be a JSON object"),
        (b"\x80\x04.", "is not UTF-8"),
        (b'{"r": 1, "r": 2}', "repeats the key 'r'"),
        (b'{"lora_alpha": Infinity}', "holds Infinity"),
        (b'{"r": ' + b"9" * 5000 + b"}", "more digits"),
        (b'{"x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "more than 8 levels"),
        (b'{"x": "' + b"y" * (256 << 10) + b'"}', "262144 bytes allowed"),
    ],
)
def test_bad_bytes(data: bytes, message: str) -> None:
    with pytest.raises(PeftConfigRejected) as caught:
        parse_manifest(data, LIMITS)
    assert caught.value.field == "adapter_config.json" and message in caught.value.message


def test_an_infinite_alpha_by_overflow_is_refused() -> None:
    data = json.dumps(PLAIN).replace("16", "1e999").encode()
    with pytest.raises(PeftConfigRejected, match="lora_alpha"):
        parse_manifest(data, LIMITS)


def test_harmless_and_empty_fields_do_not_change_the_canonical_form() -> None:
    decorated = parse(
        base_model_name_or_path="somewhere/else",
        inference_mode=True,
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
        auto_mapping={"base_model_class": "Evil", "parent_library": "somewhere.evil"},
        init_lora_weights="gaussian",
        loftq_config={},
        future_option=None,
        use_dora=False,
        bias="all",
        fan_in_fan_out=True,
        use_qalora=True,
        velora_config={"num_groups": 4},
    )
    assert decorated == parse()
    assert decorated.canonical() == parse().canonical()
    assert b"somewhere" not in decorated.canonical()


def test_a_configuration_of_plain_names_is_stored_as_ever() -> None:
    """Byte for byte, as digests of versions depend on it."""
    stored = (
        b'{"alpha_pattern":{"^model.layers.1.mlp.up_proj":3.0},"exclude_modules":["k_proj"],"layers_to_transform":[0,1],'
        b'"lora_alpha":16.0,"peft_type":"LORA","r":8,"rank_pattern":{"v_proj":4},"target_modules":["k_proj","q_proj"],'
        b'"use_rslora":true}'
    )
    manifest = parse(
        target_modules=["q_proj", "k_proj"],
        exclude_modules=["k_proj"],
        layers_to_transform=[1, 0],
        rank_pattern={"v_proj": 4},
        alpha_pattern={"^model.layers.1.mlp.up_proj": 3},
        use_rslora=True,
    )
    assert manifest.canonical() == stored and ModuleMatcher(manifest).is_literal
    assert b"tensor_names" not in parse(target_modules="all-linear").canonical()


def test_the_order_of_patterns_is_part_of_the_meaning() -> None:
    path = "model.layers.0.self_attn.q_proj"
    special = parse(alpha_pattern={path: 2, "q_proj": 4})
    general = parse(alpha_pattern={"q_proj": 4, path: 2})
    assert (scale_of(special, path), scale_of(general, path)) == (2 / 8, 4 / 8)
    assert special.canonical() != general.canonical()
    assert scale_of(parse_manifest(special.canonical(), LIMITS), path) == 2 / 8


def scale_of(manifest: PeftConfig, path: str) -> float:
    return ModuleMatcher(manifest).scale_of(path)


NAMES = st.from_regex(r"[a-z0-9_]{1,6}(\.[a-z0-9_]{1,6}){0,3}", fullmatch=True)
KEYS = st.builds(str.__add__, st.sampled_from(["", "^"]), NAMES)


@given(
    rank=st.integers(1, 256),
    alpha=st.floats(1e-6, 1e6),
    rslora=st.booleans(),
    ranks=st.dictionaries(KEYS, st.integers(1, 256), max_size=4),
    alphas=st.dictionaries(KEYS, st.floats(1e-6, 1e6), max_size=4),
    targets=st.just("all-linear") | st.lists(NAMES, min_size=1, max_size=6),
    excluded=st.lists(NAMES, max_size=3),
    layers=st.none() | st.lists(st.integers(0, 80), min_size=1, max_size=4),
)
def test_the_canonical_form_parses_to_the_same_manifest(
    rank: int,
    alpha: float,
    rslora: bool,
    ranks: dict[str, int],
    alphas: dict[str, float],
    targets: object,
    excluded: list[str],
    layers: list[int] | None,
) -> None:
    manifest = parse(
        r=rank,
        lora_alpha=alpha,
        use_rslora=rslora,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        target_modules=targets,
        exclude_modules=excluded,
        layers_to_transform=layers,
    )
    again = parse_manifest(manifest.canonical(), LIMITS)
    assert again == manifest and again.canonical() == manifest.canonical()
    assert list(again.rank_pattern) == list(ranks) and list(again.alpha_pattern) == list(alphas)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_refused_cleanly(data: bytes) -> None:
    with pytest.raises(PeftConfigRejected):
        parse_manifest(data, LIMITS)


def test_endings() -> None:
    assert endings_of("model.layers.0.mlp.up_proj")[-3:] == ("0.mlp.up_proj", "mlp.up_proj", "up_proj")
