"""GLM-4 MoE Lite (GLM-4.7-Flash) is a DeepSeek V3 without groups of experts.

Knows: the defaults of the config keys. Must not know: devices, the engine, layers.

Its latent norms have the epsilon of the other norms, as in mlx-lm and vLLM. In transformers, it is
always 1e-6.
"""

from dataclasses import dataclass

from models import deepseek_v3


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(deepseek_v3.Config):
    """The keys of config.json that this architecture reads."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.8
    first_k_dense_replace: int = 1

    @property
    def latent_norm_eps(self) -> float:
        return self.rms_norm_eps


class Model(deepseek_v3.CausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
