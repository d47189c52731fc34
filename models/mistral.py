"""Mistral (Jiang et al. 2023) is a Llama with sliding window attention.

Knows: which layers have a window. Must not know: how windows are computed.

The first release has a window in all layers, and later releases in none. Ministral has a window in
the layers listed in `layer_types`.
"""

from dataclasses import dataclass

from models import decoder, llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """The keys of config.json that this architecture reads."""

    # multimodal checkpoints omit this key if it has the default of transformers
    num_attention_heads: int = 32

    def default_layer_type(self, layer: int) -> str:
        return decoder.FULL if self.sliding_window is None else decoder.SLIDING


Model = llama.Model
