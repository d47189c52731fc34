"""Model files with the settings of an image processor and no weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.core.model_files import ModelFiles
from app.images.plan import ImageProcessor
from app.images.processor import load_image_processor


def make_files(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> ModelFiles:
    return ModelFiles(
        name="model",
        path=Path("model"),
        config={"vision_config": {"depth": 1}, **config},
        shards=(),
        tokenizer_path=Path("tokenizer.json"),
        tokenizer_config={},
        generation_config={},
        chat_template=None,
        created=0,
        processor_config=processor or {},
    )


def load(
    model_type: str,
    processor: Mapping[str, Any] | None = None,
    *,
    max_tokens: int = 4096,
    **config: Any,
) -> ImageProcessor:
    """Returns the image processor of a model of this type. config: keys of config.json."""
    files = make_files({"model_type": model_type, **config}, processor)
    found = load_image_processor(files, max_tokens=max_tokens)
    assert found is not None
    return found
