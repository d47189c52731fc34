"""The text model of Qwen3-VL (Qwen team 2025) is a Qwen3 with M-RoPE.

Knows: the axes of M-RoPE. Must not know: vision towers.
"""

from dataclasses import dataclass
from typing import Literal

from models import qwen3
from models.rope import Scaling

# mrope_section, if config.json does not have it, as in transformers' Qwen3VLTextConfig
DEFAULT_SECTION = (24, 20, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen3.Config):
    """The keys of config.json that this architecture reads."""

    @property
    def image_positions(self) -> Literal["mrope"]:
        return "mrope"

    def rope_settings(self, layer_type: str | None = None) -> tuple[float, Scaling | None]:
        # `super()` without arguments fails here, because `slots=True` creates a new class
        theta, scaling = qwen3.Config.rope_settings(self, layer_type)
        return theta, interleave_axes(scaling, DEFAULT_SECTION)


Model = qwen3.Model


def interleave_axes(scaling: Scaling | None, section: tuple[int, int, int]) -> Scaling:
    """Returns rope settings with interleaved M-RoPE, whatever `mrope_interleaved` says, as in
    transformers. section: the default of `mrope_section`."""
    return {"mrope_section": section, **(scaling or {}), "mrope_interleaved": True}
