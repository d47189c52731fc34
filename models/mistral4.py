"""Mistral Small 4 (Mistral AI 2026) is a DeepSeek V3 whose experts are selected by a softmax, and
whose queries are scaled by position, as in Ministral 3.

Knows: the defaults of the config keys, the scale of a query. Must not know: devices, the engine,
how latent attention is computed.
"""

from dataclasses import dataclass

import mlx.core as mx

from models import deepseek_v3
from models.base import ModelError
from models.ministral3 import compute_query_scales, read_query_scaling
from models.rope import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(deepseek_v3.Config):
    """The keys of config.json that this architecture reads. In `rope_parameters`,
    partial_rotary_factor is the share of the rotary part in a query."""

    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    scoring_func: str = "softmax"

    def rope_settings(self, layer_type: str | None = None) -> tuple[float, Scaling | None]:
        theta, scaling = deepseek_v3.Config.rope_settings(self, layer_type)
        rotary, size = self.qk_rope_head_dim, self.qk_rope_head_dim + self.qk_nope_head_dim
        share = (scaling or {}).get("partial_rotary_factor", rotary / size)
        if not isinstance(share, int | float) or abs(share * size - rotary) > 0.5:
            raise ModelError(
                f"config.json's partial_rotary_factor is {share!r}, but {rotary} of {size} "
                "dimensions are rotary"
            )
        # here it is relative to the rotary part
        return theta, {**(scaling or {}), "partial_rotary_factor": 1.0}


class Attention(deepseek_v3.Attention):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.beta, self.original_length = read_query_scaling(config)

    def _queries(self, x: mx.array, offset: int | mx.array) -> mx.array:
        queries = super()._queries(x, offset)
        scales = compute_query_scales(
            x.shape[1], offset, beta=self.beta, original_length=self.original_length
        )
        return queries * scales.astype(queries.dtype)


class Model(deepseek_v3.CausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(config, attention=Attention, supported={"scoring_func": ("softmax",)})
