"""Mistral (Jiang et al. 2023): a Llama with sliding window attention.

The first release has a window in all layers, later ones in none, and Ministral in the layers that
`layer_types` lists.
"""

from dataclasses import dataclass

from models import decoder, llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """The keys of config.json that this architecture reads."""

    # multimodal checkpoints omit it if it has transformers' default
    num_attention_heads: int = 32

    def default_layer_type(self, layer: int) -> str:
        return decoder.FULL if self.sliding_window is None else decoder.SLIDING


Model = llama.Model
