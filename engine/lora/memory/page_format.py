"""`PageFormat`: the element type of an adapter's pages, and the conversion to it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from loraplex.engine.lora.memory.rank_quantization import QuantizationReport, QuantizedModule, quantize_module
from loraplex.engine.lora.weights import LoraModule, LoraWeights

QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class PageFormat:
    """`page_dtype` None: pages of the model's type. `max_error` bounds the relative error of every module's delta."""

    model_dtype: torch.dtype
    page_dtype: torch.dtype | None = None
    max_error: float = 0.05

    @staticmethod
    def of(name: str, model_dtype: torch.dtype, max_error: float) -> "PageFormat":
        """Return the format of `name`: auto, int8 or fp8. Raises `ValueError` for another name."""
        if name != "auto" and name not in QUANTIZED:
            raise ValueError(f"`page_dtype` must be auto, int8 or fp8, got {name!r}")
        return PageFormat(model_dtype, QUANTIZED.get(name), max_error)

    @property
    def dtype(self) -> torch.dtype:
        return self.page_dtype or self.model_dtype

    def quantized(
        self, weights: LoraWeights, names: Iterable[str]
    ) -> tuple[Mapping[str, QuantizedModule], QuantizationReport]:
        """Return the adapter's modules in the order of `names`, in `page_dtype`. Raises `AdapterInexact`."""
        modules = {
            name: quantize_module(weights.modules[name], self.dtype)
            for name in names
            if name in weights.modules
        }
        report = QuantizationReport({name: module.error for name, module in modules.items()})
        report.require(weights.digest, self.max_error)
        return modules, report

    def rounded(
        self, weights: LoraWeights, names: Iterable[str]
    ) -> tuple[Mapping[str, LoraModule], QuantizationReport | None]:
        """Return the modules in the model's type, with the values that the pages represent. Raises `AdapterInexact`."""
        if self.page_dtype is None:
            return {name: weights.modules[name] for name in names if name in weights.modules}, None
        modules, report = self.quantized(weights, names)
        return {name: module.dequantized(self.model_dtype) for name, module in modules.items()}, report
