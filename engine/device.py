"""Facts of the machine: which device, which type to compute in, how much memory."""

import torch

from loraplex.engine.capacity.memory_plan import Machine
from loraplex.engine.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """Resolve a device name; `auto` takes CUDA if available. Raises `ModelError` for a device that this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ModelError(f"`device` must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("`device` is cuda, but this machine has no CUDA device torch can use")
    return torch.device(name)


def choose_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """Resolve a type name. `auto` takes the checkpoint's type; on a CPU bfloat16 if it has instructions for it, else
    float32.

    float16 is slow on CPUs at more than one row, so `auto` never picks it there.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ModelError(f"`dtype` must be auto, float32, bfloat16 or float16, got {name!r}")
        return DTYPES[name]
    wanted = DTYPES.get(checkpoint or "", torch.float32)
    if device.type != "cpu" or wanted is torch.float32:
        return wanted
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def check_products(dtype: torch.dtype, device: torch.device) -> None:
    """Check that `device` multiplies unquantized weights of `dtype`. Raises `ModelError` for float16 on a CPU without it."""
    if dtype is not torch.float16 or device.type != "cpu" or not torch._C._has_mkldnn:
        return
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        works = "float32, bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
        raise ModelError(
            f"`dtype` float16 needs instructions that this CPU lacks to multiply unquantized weights; allowed: auto, {works}"
        )


def machine_of(device: torch.device, dtype: torch.dtype) -> Machine:
    """Describe the device for the memory plan. A CPU's memory is shared, so its size is left unknown."""
    name = str(dtype).removeprefix("torch.")
    if device.type != "cuda":
        return Machine(is_cuda=False, dtype=name)
    free, total = torch.cuda.mem_get_info(device)
    return Machine(is_cuda=True, dtype=name, memory=total, free=free)
