"""SmolLM3 (Hugging Face 2025) is a Llama without rope in every fourth layer.

Knows: which layers use rope. Must not know: devices, kernels, types of caches.

The causal mask still gives these layers positional information (Kazemnejad et al. 2023; Yang et
al. 2025).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from models import decoder, llama
from models.base import ModelError
from models.rope import NoRope, Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """The keys of config.json that this architecture reads. no_rope_layers: for each layer, 1 if
    the layer uses rope and 0 if not, despite the name of the key."""

    rope_theta: float = 2_000_000.0
    no_rope_layers: Sequence[int] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False

    def uses_rope(self, layer: int) -> bool:
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        if len(self.no_rope_layers) != self.num_hidden_layers:
            raise ModelError("config.json's no_rope_layers must have one entry per layer")
        return bool(self.no_rope_layers[layer])

    def layer_rope(self, layer: int) -> Rope | NoRope:
        return self.rope() if self.uses_rope(layer) else NoRope()

    def default_layer_type(self, layer: int) -> str:
        slides = self.use_sliding_window and self.sliding_window is not None
        return decoder.SLIDING if slides and not self.uses_rope(layer) else decoder.FULL


Model = llama.Model
