"""The oracle of parity: random PEFT adapters on the demo model, and `transformers`+PEFT greedily run one row at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.quantization.quantized_weight import QuantizedWeight, dequantize
from loraplex.engine.quantization.scheme import quantize_parameter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
BASE = "base"


@dataclass(frozen=True)
class Recipe:
    """A random adapter. `strength` scales B: large enough that answers change."""

    name: str
    rank: int
    targets: tuple[str, ...] | str
    options: tuple[tuple[str, Any], ...] = ()
    strength: float = 0.6


RECIPES = (
    Recipe("attention-4", 4, ATTENTION),
    Recipe("mlp-4", 4, MLP, strength=1.5),
    Recipe("qv-8", 8, ("q_proj", "v_proj"), strength=1.5),
    Recipe("all-8", 8, "all-linear"),
    Recipe("attention-16-rslora", 16, ATTENTION, (("use_rslora", True),), strength=0.15),
    Recipe("down-16", 16, ("down_proj",), strength=0.8),
    Recipe(
        "patterned-8-32",
        8,
        (*ATTENTION, "down_proj"),
        (("rank_pattern", {"q_proj": 32, "down_proj": 3}), ("alpha_pattern", {"q_proj": 48})),
    ),
    Recipe("all-64", 64, (*ATTENTION, *MLP)),
    Recipe("mlp-64", 64, MLP, strength=1.5),
)


@dataclass(frozen=True)
class Case:
    """One request: an adapter's name or `BASE`, and the prompt's ids."""

    adapter: str
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """Greedy tokens and, at each of them, the difference between the two largest logits."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


def write_adapters(model_path: Path, folder: Path) -> dict[str, Path]:
    """Every recipe as PEFT's `save_pretrained` writes it: name -> folder."""
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return {recipe.name: _write(recipe, base, folder / recipe.name) for recipe in RECIPES}


def _write(recipe: Recipe, base: Any, folder: Path) -> Path:
    """Leaves `base` as it was."""
    targets = recipe.targets if isinstance(recipe.targets, str) else list(recipe.targets)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=targets,
        task_type="CAUSAL_LM",
        **dict(recipe.options),
    )
    model: Any = get_peft_model(base, config)
    draws = torch.Generator().manual_seed(RECIPES.index(recipe))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            spread = parameter.shape[1] ** -0.5 * (recipe.strength if "lora_B" in name else 1.0)
            parameter.data = torch.randn(parameter.shape, generator=draws) * spread
    model.save_pretrained(folder)
    model.unload()
    return folder


def round_weights(model: Any, scheme: str) -> None:
    """Every projection and the head in the engine's format, converted back to floats; the embedding keeps its values."""
    config, state = model.config, model.state_dict()
    names = {
        "self_attn.q_proj": "qkv",
        "self_attn.k_proj": "qkv",
        "self_attn.v_proj": "qkv",
        "self_attn.o_proj": "o",
    }
    names |= {"mlp.gate_proj": "gate_up", "mlp.up_proj": "gate_up", "mlp.down_proj": "down"}
    for layer in range(config.num_hidden_layers):
        for module, parameter in names.items():
            weight = state[f"model.layers.{layer}.{module}.weight"]
            weight.copy_(turned_back(f"layers.{layer}.{parameter}", weight, scheme))
    head = turned_back("lm_head", model.lm_head.weight.data, scheme)
    model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)


def turned_back(name: str, weight: Tensor, scheme: str) -> Tensor:
    rounded = quantize_parameter(name, weight, scheme)
    return dequantize(rounded) if isinstance(rounded, QuantizedWeight) else rounded


class PeftReference:
    """One fp32 model with every adapter loaded, each request in a batch of its own."""

    def __init__(self, model_path: Path, adapters: dict[str, Path], scheme: str = "none") -> None:
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        round_weights(base, scheme)
        base.generation_config.eos_token_id = None
        names = list(adapters)
        self._model: Any = PeftModel.from_pretrained(base, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self._model.load_adapter(adapters[name], name)
        self._model.eval()

    def answer(self, case: Case, tokens: int) -> Completion:
        """Exactly `tokens` greedy tokens; an end token does not end them."""
        if case.adapter == BASE:
            with self._model.disable_adapter():
                return self._generate(case.prompt, tokens)
        self._model.set_adapter(case.adapter)
        return self._generate(case.prompt, tokens)

    @torch.inference_mode()
    def _generate(self, prompt: tuple[int, ...], tokens: int) -> Completion:
        ids = torch.tensor([prompt])
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.cat(output.logits).float().topk(2).values
        return Completion(
            tuple(output.sequences[0, len(prompt) :].tolist()), tuple((best[:, 0] - best[:, 1]).tolist())
        )
