"""Selects the image processor of a model.

Knows: the model types of config.json. Must not know: the rules of a family, pixels, templates.
"""

from collections.abc import Callable, Mapping
from typing import cast

from app.core.model_files import Json, ModelFiles
from app.images.plan import DEFAULT_MAX_TOKENS, ImageProcessor
from app.images.processor_settings import ProcessorSettings
from app.images.processors.gemma import Gemma3Processor, Gemma4Processor
from app.images.processors.lfm2_vl import Lfm2VlProcessor
from app.images.processors.pixtral import PixtralProcessor
from app.images.processors.qwen_vl import QwenVlProcessor
from app.images.processors.smolvlm import SmolVlmProcessor

# model_type of config.json → the class of the processor
_PROCESSORS: Mapping[str, Callable[[ProcessorSettings, int], ImageProcessor]] = {
    "qwen2_vl": QwenVlProcessor,
    "qwen2_5_vl": QwenVlProcessor,
    "qwen3_vl": QwenVlProcessor,
    "qwen3_vl_moe": QwenVlProcessor,
    "qwen3_5": QwenVlProcessor,
    "qwen3_5_moe": QwenVlProcessor,
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
    "gemma4_unified": Gemma4Processor,
    "mistral3": PixtralProcessor,
    "pixtral": PixtralProcessor,
    "idefics3": SmolVlmProcessor,
    "smolvlm": SmolVlmProcessor,
    "lfm2_vl": Lfm2VlProcessor,
}


def load_image_processor(
    files: ModelFiles, *, max_tokens: int = DEFAULT_MAX_TOKENS
) -> ImageProcessor | None:
    """Returns the image processor of a model; None if its family has none, or if its config has no
    vision tower. max_tokens: the largest number of tokens per image; images that would need more
    are scaled down. Raises AppError(MODEL_FILES) for invalid settings of the model."""
    make = _PROCESSORS.get(_find_type(files.config))
    if make is None or not files.config.get("vision_config"):
        return None
    return make(ProcessorSettings(files), max_tokens)


def _find_type(config: Json) -> str:
    """Returns the model type that determines the processor. LLaVA's classes are used with several
    towers."""
    kind, vision = config.get("model_type"), config.get("vision_config")
    if kind == "llava" and isinstance(vision, Mapping):
        kind = cast(Json, vision).get("model_type")
    return str(kind)
