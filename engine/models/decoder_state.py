"""`DecoderState`: the decoder's parameters by name, before they are laid out for a device."""

from typing import TypeAlias

from torch import Tensor

from loraplex.engine.quantization.quantized_weight import QuantizedWeight

Weight: TypeAlias = Tensor | QuantizedWeight


class DecoderState(dict[str, Weight]):
    """Parameters by name, taken out one by one, so that each can be freed once it is laid out again."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters; one that serves twice counts once."""
        distinct = {id(weight): weight for weight in self.values()}.values()
        return sum(w.num_bytes if isinstance(w, QuantizedWeight) else w.nbytes for w in distinct)

    def take_weight(self, name: str) -> Weight:
        """A matrix, quantized or not."""
        return self.pop(name)

    def take_tensor(self, name: str) -> Tensor:
        """A parameter that is never quantized."""
        weight = self.pop(name)
        if isinstance(weight, QuantizedWeight):
            raise TypeError(f"{name} is quantized")
        return weight

    def take_bias(self, name: str) -> Tensor | None:
        """A bias, where the model has it."""
        return self.take_tensor(name) if name in self else None
