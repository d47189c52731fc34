"""Reads the settings of an image processor: from the files of the model, or the class defaults.

Knows: preprocessor_config.json, config.json and tokenizer_config.json as parsed JSON, the types of
values, transformers' numbers of resampling filters.
Must not know: the meaning of a setting.

The files come from the author of the model and are not trusted: a wrong type or an excessive value
is an error that names the key.
"""

from collections.abc import Mapping
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.model_files import Json, ModelFiles
from app.images.plan import Filter

# larger than every published setting: the areas of Qwen-VL, 16384 × 16384 pixels
_MAX_VALUE = 1 << 28

# the values of "resample" (Pillow's Resampling)
_FILTERS: Mapping[int, Filter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


class ProcessorSettings:
    """The settings of one model. All methods raise AppError(MODEL_FILES) for an invalid value.

    A key may be a path: "size.longest_edge". A value that is missing or null is the default.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    @property
    def model_type(self) -> str:
        return str(self._files.config.get("model_type", ""))

    def read_int(self, key: str, default: int) -> int:
        """Returns a positive integer of the image processor's configuration."""
        return self._read_int(self._files.processor_config, key, default, "the image processor")

    def read_model_int(self, key: str, default: int) -> int:
        """Returns a positive integer of config.json."""
        return self._read_int(self._files.config, key, default, "config.json")

    def read_bool(self, key: str, default: bool) -> bool:
        value = _look_up(self._files.processor_config, key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._make_error(key, value, "true or false", "the image processor")
        return value

    def read_float(self, key: str, default: float) -> float:
        """Returns a number of at least 1 of the image processor's configuration."""
        value = _look_up(self._files.processor_config, key)
        if value is None:
            return default
        if not isinstance(value, int | float) or not 1 <= value <= _MAX_VALUE:
            raise self._make_error(key, value, "a number of 1 or more", "the image processor")
        return float(value)

    def read_filter(self, default: Filter) -> Filter:
        """Returns the resampling filter."""
        value = _look_up(self._files.processor_config, "resample")
        if value is None:
            return default
        if value not in _FILTERS:
            raise self._make_error("resample", value, "1, 2 or 3", "the image processor")
        return _FILTERS[value]

    def read_token(self, key: str, default: str) -> str:
        """Returns the text of a special token, for example of "image_token"."""
        config = self._files.tokenizer_config
        value = _look_up(config, key) or _look_up(config, f"extra_special_tokens.{key}")
        if isinstance(value, Mapping):  # an AddedToken
            value = cast(Json, value).get("content")
        return value if isinstance(value, str) and value else default

    def _read_int(self, source: Json, key: str, default: int, origin: str) -> int:
        value = _look_up(source, key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_VALUE:
            raise self._make_error(key, value, f"an integer from 1 to {_MAX_VALUE}", origin)
        return value

    def _make_error(self, key: str, value: object, expected: str, origin: str) -> AppError:
        message = (
            f"{self._files.path}: {key} of {origin} is {str(value)[:80]!r}, but must be {expected}"
        )
        return AppError(ErrorKind.MODEL_FILES, message)


def _look_up(source: Json, path: str) -> Any:
    value: Any = source
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = cast(Json, value).get(key)
    return value
