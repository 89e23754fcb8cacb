"""The widths of one decoder layer, of models people serve, and of one that takes no time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Widths of a layer. Products are [outputs, inputs], the fused ones as the engine has them."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def products(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the four base products."""
        return {
            "qkv": (self.q_size + 2 * self.kv_size, self.hidden),
            "o": (self.hidden, self.q_size),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def sites(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """(inputs, outputs of each slice) of the four places where adapters act."""
        return {
            "qkv": (self.hidden, (self.q_size, self.kv_size, self.kv_size)),
            "o": (self.q_size, (self.hidden,)),
            "gate_up": (self.hidden, (self.intermediate, self.intermediate)),
            "down": (self.intermediate, (self.hidden,)),
        }


LLAMA_3_8B = LayerShape("llama-3-8b", 4096, 14336, 32, 8, 128, 128_256, 32)
QWEN3_4B = LayerShape("qwen3-4b", 2560, 9728, 32, 8, 128, 151_936, 36)
TINY = LayerShape("tiny", 64, 128, 4, 2, 16, 512, 2)
LAYER_SHAPES = {shape.name: shape for shape in (LLAMA_3_8B, QWEN3_4B, TINY)}
