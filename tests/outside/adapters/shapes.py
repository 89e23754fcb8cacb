"""The shapes of adapters that people bring, and how each is made with the installed PEFT.

A shape is trained here by drawing its weights at random, saved by PEFT, and then edited as exporters and wrappers do.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ABSENT = object()
"""A field that the edited configuration does not have."""
Edit: TypeAlias = Callable[[Path], None]
Base: TypeAlias = Literal["causal", "tied", "bare"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`lora`: arguments of `LoraConfig`, or another PEFT configuration. `base`: bare is the model without its head.

    `reference`: whose forward pass is right, the trained model's, or that of the saved and edited files as PEFT loads them.
    `refused`: text of the reason; `though_plain`: why it is refused although PEFT computes plain LoRA. `warned`: text of a
    warning.
    """

    name: str
    lora: Any = field(default_factory=dict)
    save: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    base: Base = "causal"
    reference: Literal["trained", "loaded"] = "trained"
    refused: str | None = None
    though_plain: str | None = None
    warned: str | None = None


def train(shape: Shape, base: Any, folder: Path) -> Any:
    """Make the adapter on `base`, with weights that change answers; save it, edit it, and return the trained model."""
    lora = shape.lora
    if isinstance(lora, dict):
        lora = LoraConfig(**{"task_type": "CAUSAL_LM" if shape.base != "bare" else None, "r": 4} | lora)
    model = get_peft_model(base, lora)
    draws = torch.Generator().manual_seed(len(shape.name))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draws))
    model.save_pretrained(str(folder), **shape.save)
    (folder / "README.md").unlink(missing_ok=True)
    for edit in shape.edits:
        edit(folder)
    return model.eval()


def config(**changes: Any) -> Edit:
    """Set fields of the configuration, or remove those that are `ABSENT`."""

    def edit(folder: Path) -> None:
        fields = json.loads((folder / CONFIG).read_text()) | changes
        kept = {key: value for key, value in fields.items() if value is not ABSENT}
        (folder / CONFIG).write_text(json.dumps(kept))

    return edit


def only(*keys: str, **more: Any) -> Edit:
    """Keep these fields of the configuration, as a small exporter writes them."""

    def edit(folder: Path) -> None:
        fields = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({key: fields[key] for key in keys} | more))

    return edit


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Edit:
    def edit(folder: Path) -> None:
        changed = change(load_file(folder / WEIGHTS))
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, folder / WEIGHTS)

    return edit


def named(rename: Callable[[str], str]) -> Edit:
    return tensors(lambda found: {rename(name): tensor for name, tensor in found.items()})


def replaced(old: str, new: str) -> Edit:
    return named(lambda name: name.replace(old, new))


def cast(dtype: torch.dtype) -> Edit:
    return tensors(lambda found: {name: tensor.to(dtype) for name, tensor in found.items()})


def with_tensor(name: str, *shape: int) -> Edit:
    return tensors(lambda found: found | {name: torch.ones(shape)})


def without(text: str) -> Edit:
    return tensors(lambda found: {name: each for name, each in found.items() if text not in name})


def pickled(folder: Path) -> None:
    """As PEFT saved before 0.5, and with safe_serialization=False."""
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
