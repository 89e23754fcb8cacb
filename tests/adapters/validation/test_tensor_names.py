"""Names of wrappers become plain ones in one way; odd names and thousands of them stay bounded."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.tensor_names import plain_names, read_name, renamed

LAYERS = 126
MODULES = {
    path: AdaptableModule(path, path, 16, 16, layer)
    for layer in range(LAYERS)
    for path in (f"model.layers.{layer}.self_attn.q_proj", f"model.layers.{layer}.mlp.up_proj")
} | {path: AdaptableModule(path, path, 16, 16) for path in ("model.embed_tokens", "lm_head")}
PLAIN = [f"base_model.model.{path}.lora_{half}.weight" for path in MODULES for half in "AB"]
PART = st.sampled_from(
    [
        "base_model",
        "model",
        "layers",
        "0",
        "7",
        "125",
        "126",
        "01",
        "٣",
        "*",
        "self_attn",
        "mlp",
        "q_proj",
        "up_proj",
        "lm_head",
        "embed_tokens",
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "weight",
        "default",
        "bias",
        "module",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "language_model",
        "modules_to_save",
    ]
)


def test_plain_names_need_no_table() -> None:
    names = plain_names(PLAIN, MODULES)
    assert names.table == {} and names.problems == ()
    assert all(name == plain for name, plain in names.canonical.items())


def test_layers_share_a_row_and_a_stored_file_is_read_by_it() -> None:
    wrapped = [
        f"_orig_mod.{name}".replace(".self_attn", "._fsdp_wrapped_module.self_attn").replace(
            "lora_A", "lora_A.default"
        )
        for name in PLAIN
    ]
    names = plain_names(wrapped, MODULES)
    assert len(names.table) == 8 and names.problems == ()
    assert [renamed(name, names.table) for name in wrapped] == PLAIN


SAVED = "base_model.model.lm_head.modules_to_save.default.weight"
Q_PROJ = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.{}.weight"


def test_a_saved_copy_is_named_as_the_module() -> None:
    plain = "base_model.model.lm_head.weight"
    names = plain_names([SAVED], MODULES)
    assert names.canonical == names.table == {SAVED: plain}
    assert "is the same tensor as" in plain_names([SAVED, plain], MODULES).problems[0][1]


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.lora_embedding_A.weight",
        "base_model.model.lm_head.lora_velora_embed.weight",
        "base_model.model.lm_head.lora_A.a.b.weight",
        "base_model.model.lm_head.modules_to_save",
        "base_model.model.lm_head.modules_to_save.default.lora_A.weight",
        "base_model.model.lm_head.modules_to_save.default.base_layer.weight",
    ],
)
def test_what_peft_does_not_write_is_read_as_nothing(name: str) -> None:
    assert read_name(name, MODULES) is None


def test_an_adapter_may_be_named_as_a_wrapper() -> None:
    names = plain_names([Q_PROJ.format(0, "module"), Q_PROJ.format(1, "default")], MODULES)
    assert "holds 2 adapters (default, module)" in names.problems[0][1]


def test_eight_thousand_names_are_read_quickly() -> None:
    names = [("_orig_mod." * 40 + PLAIN[n % len(PLAIN)])[:480] + f".{n}" for n in range(8192)]
    started = time.process_time()
    found = plain_names(names, MODULES)
    assert time.process_time() - started < 2 and len(found.canonical) == 8192


@given(st.lists(st.lists(PART, min_size=1, max_size=9).map(".".join), max_size=6, unique=True))
def test_any_names_are_read_alike_when_stored(names: list[str]) -> None:
    """Without a problem, each plain name is of one tensor, and the table gives the same ones."""
    found = plain_names(names, MODULES)
    if not found.problems:
        assert len(set(found.canonical.values())) == len(names)
        assert {name: renamed(name, found.table) for name in names} == dict(found.canonical)
