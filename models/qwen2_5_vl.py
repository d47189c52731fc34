"""The text model of Qwen2-VL and Qwen2.5-VL (Wang et al. 2024, Bai et al. 2025) is a Qwen2 with
M-RoPE.

Knows: the axes of M-RoPE. Must not know: vision towers.
"""

from dataclasses import dataclass
from typing import Literal

from models import qwen2
from models.rope import Scaling

# mrope_section, if config.json does not have it, as in transformers
_DEFAULT_SECTION = (16, 24, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2.Config):
    """The keys of config.json that this architecture reads."""

    @property
    def image_positions(self) -> Literal["mrope"]:
        return "mrope"

    def rope_settings(self, layer_type: str | None = None) -> tuple[float, Scaling | None]:
        # `super()` without arguments fails here, because `slots=True` creates a new class
        theta, scaling = qwen2.Config.rope_settings(self, layer_type)
        return theta, {"mrope_section": _DEFAULT_SECTION, **(scaling or {})}


Model = qwen2.Model
