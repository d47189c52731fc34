"""What the model's makers recommend, where a request does not say.

Knows: the keys of generation_config.json (those of transformers' GenerationConfig, and the three
that only Ollama's parameters have: presence_penalty, frequency_penalty, repeat_last_n). Must not
know: tokens, files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.model_files import Json, ModelFiles
from app.core.requests import SamplingValue

# key -> the least and the most that it may be; the same as a request may ask for
_FLOAT_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_INT_RANGES: Mapping[str, tuple[int, int]] = {
    "top_k": (-1, 1 << 31),
    "repeat_last_n": (-1, 1 << 31),
    "seed": (-1 << 63, (1 << 63) - 1),
}

# what greedy decoding has no use for
_RANDOM_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """sampling: fields of `SamplingParams` by name. max_tokens: None for the rest of the context.
    stops: texts that end an answer."""

    sampling: Mapping[str, SamplingValue] = field(default_factory=dict[str, SamplingValue])
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()


def read_generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """They stand between our defaults and the request. Keys that we have no use for are not
    looked at; null is like not there.

    Raises AppError(MODEL_FILES), naming file and key, for a value that cannot be meant.
    """
    config = files.generation_config
    try:
        return GenerationDefaults(
            sampling=_read_sampling(config),
            max_tokens=_read_max_tokens(config),
            stop_strings=_read_stop_strings(config),
        )
    except _InvalidValue as error:
        message = f"generation_config.json of {files.path}: {error}"
        raise AppError(ErrorKind.MODEL_FILES, message) from error


class _InvalidValue(ValueError):
    def __init__(self, key: str, value: Any, expected: str) -> None:
        told = repr(value)
        super().__init__(f"{key} is {told[:80]}, but must be {expected}")


def _read_sampling(config: Json) -> Mapping[str, SamplingValue]:
    """`do_sample: false` means greedy; penalties count all the same."""
    found: dict[str, SamplingValue] = {}
    for key, (low, high) in _FLOAT_RANGES.items():
        value: Any = config.get(key)
        if value is not None:
            if not _is_number(value) or not low <= value <= high:
                raise _InvalidValue(key, value, f"a number from {low:g} to {high:g}")
            found[key] = float(value)
    for key, bounds in _INT_RANGES.items():
        value = config.get(key)
        if value is not None:
            if not _is_integer(value) or not bounds[0] <= value <= bounds[1]:
                raise _InvalidValue(key, value, f"an integer of {bounds[0]} or more")
            found[key] = value
    if found.get("top_k") == -1:  # as vLLM's 0: off
        found["top_k"] = 0
    do_sample: Any = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise _InvalidValue("do_sample", do_sample, "true or false")
    if do_sample is False:
        found = {key: value for key, value in found.items() if key not in _RANDOM_SAMPLING_KEYS}
        found["temperature"] = 0.0
    return found


def _read_max_tokens(config: Json) -> int | None:
    """-1 and -2 are Ollama's words for as many as there is room for."""
    value: Any = config.get("max_new_tokens")
    if value is None or value in (-1, -2):
        return None
    if not _is_integer(value) or value < 1:
        raise _InvalidValue("max_new_tokens", value, "an integer of 1 or more")
    return value


def _read_stop_strings(config: Json) -> tuple[str, ...]:
    value: Any = config.get("stop_strings")
    if value is None:
        return ()
    texts = cast("list[Any]", value if isinstance(value, list) else [value])
    if not all(isinstance(text, str) and text for text in texts):
        raise _InvalidValue("stop_strings", value, "a string or a list of strings")
    return tuple(dict.fromkeys(texts))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
