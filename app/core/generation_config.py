"""The generation defaults recommended by the model's authors, used for fields that a request does
not set.

Knows: the keys of generation_config.json, as defined by transformers' GenerationConfig, and three
Ollama parameters: presence_penalty, frequency_penalty, repeat_last_n. Must not know: tokens, files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.model_files import Json, ModelFiles
from app.core.sampling_params import SAMPLING_KNOBS, SamplingValue

# keys that have no effect in greedy decoding
RANDOM_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The defaults of a model. sampling: fields of `SamplingParams` by name. max_tokens: the
    maximum number of output tokens; None uses the rest of the context. stop_strings: strings that
    end the output."""

    sampling: Mapping[str, SamplingValue] = field(default_factory=dict[str, SamplingValue])
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()


def read_generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """Reads the model's defaults. They override the server's defaults, and requests override them.
    Unknown keys are ignored, and null is treated as missing.

    Raises AppError(MODEL_FILES) for an invalid value. The error names the file and the key.
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
        text = repr(value)
        super().__init__(f"{key} is {text[:80]}, but must be {expected}")


def _read_sampling(config: Json) -> Mapping[str, SamplingValue]:
    """Reads the sampling parameters. `do_sample: false` selects greedy decoding; penalties still
    apply."""
    found: dict[str, SamplingValue] = {}
    for knob in SAMPLING_KNOBS:
        value: Any = config.get(knob.name)
        if value is None:
            continue
        if knob.kind is int:
            if not _is_integer(value) or not knob.low <= value <= knob.trusted_high:
                raise _InvalidValue(knob.name, value, f"an integer of {knob.low:.0f} or more")
            found[knob.name] = value
        else:
            if not _is_number(value) or not knob.low <= value <= knob.trusted_high:
                range_ = f"a number from {knob.low:g} to {knob.trusted_high:g}"
                raise _InvalidValue(knob.name, value, range_)
            found[knob.name] = float(value)
        if found[knob.name] == knob.off:
            found[knob.name] = knob.default
    do_sample: Any = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise _InvalidValue("do_sample", do_sample, "true or false")
    if do_sample is False:
        found = {key: value for key, value in found.items() if key not in RANDOM_SAMPLING_KEYS}
        found["temperature"] = 0.0
    return found


def _read_max_tokens(config: Json) -> int | None:
    """Returns the maximum number of output tokens. Returns None for -1 and -2, which mean in Ollama
    that only the context limits the output."""
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
