"""DeepSeek V2, V2-Lite and V2.5, and DeepSeek-Coder V2 (DeepSeek-AI 2024): a DeepSeek V3 whose
experts are selected by a softmax.

Knows: the config keys, the methods of selection. Must not know: devices, the engine, layers.

Source: DeepSeek-V2 (2024), section 2.2. With `group_limited_greedy`, a token uses only experts of
its best groups, and the score of a group is the score of its best expert (V2, V2.5). With `greedy`,
there are no groups (V2-Lite). The weights of the selected experts are not normalized: the original
code, transformers and llama.cpp differ in what a norm_topk_prob of true means, and no published
model has it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from models import deepseek_v3

_GROUPED, _PLAIN = "group_limited_greedy", "greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(deepseek_v3.Config):
    """The keys of config.json that this architecture reads."""

    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    scoring_func: str = "softmax"
    topk_method: str = _PLAIN

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """See `decoder.Config.from_dict`. Groups have no effect without the method that uses
        them."""
        if config.get("topk_method", _PLAIN) == _PLAIN:
            config = {**config, "n_group": 1, "topk_group": 1}
        return super(Config, cls).from_dict(config)

    @property
    def group_score_experts(self) -> int:
        return 1


_SUPPORTED: Mapping[str, Sequence[Any]] = {
    "scoring_func": ("softmax",),
    "topk_method": (_PLAIN, _GROUPED),
    "norm_topk_prob": (False,),
}


class Model(deepseek_v3.CausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(config, supported=_SUPPORTED)
