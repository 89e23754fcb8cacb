"""adapter_config.json beside the installed PEFT's own: the same fields and defaults. `security/test_optimized.py` need not import it."""

import dataclasses

from peft import LoraConfig
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.validation.peft_config import DEFAULT_TARGETS, parse_manifest
from loraplex.adapters.validation.peft_fields import IGNORED, REFUSED, USED


def test_every_field_of_pefts_lora_config_is_in_one_table() -> None:
    """A field of a newer PEFT is a decision; `merge_weights` is of versions before 0.4."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    tables = (USED.keys(), IGNORED.keys(), REFUSED.keys())
    assert fields | {"merge_weights"} == set().union(*tables)
    assert sum(map(len, tables)) == len(fields) + 1


def test_missing_fields_have_pefts_own_defaults() -> None:
    """Of architectures that are served, PEFT targets the same modules."""
    given = LoraConfig()
    bare = parse_manifest(b'{"peft_type": "LORA"}', AdapterLimits())
    assert (bare.rank, bare.alpha, bare.use_rslora) == (given.r, given.lora_alpha, given.use_rslora)
    assert bare.defaults == ("r = 8", "lora_alpha = 8", "target_modules = ['q_proj', 'v_proj']")
    targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    served = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
    assert bare.target_modules == DEFAULT_TARGETS
    assert all(set(targets.get(kind, DEFAULT_TARGETS)) == DEFAULT_TARGETS for kind in served)
