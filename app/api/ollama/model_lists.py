"""Ollama's model lists and descriptions: tags, ps, show.

Knows: the keys that clients require (Zed all of `details`, Copilot `capabilities` and
`model_info`). Must not know: how model details are read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from app.api.ollama.names import add_tag
from app.api.ollama.output import format_time
from app.core.models import ModelDetails, ModelState, TensorDetails
from app.core.sampling_params import SAMPLING_KNOBS
from app.core.units import format_count
from app.http.responses import JsonObject

# the `expires_at` of a model that never expires; clients require a date
NEVER = "2318-01-01T00:00:00Z"

# maps a key of config.json to the key in `model_info`, without the architecture prefix
_CONFIG_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}

# Continue completes code if `template` contains `.Suffix`
_INSERT_MARK = "{{- /* fill in the middle: .Prompt .Suffix */ -}}\n"

_NANOSECONDS = 1_000_000_000


def render_details(details: ModelDetails) -> JsonObject:
    """Builds `details`. Some clients require every key."""
    size = details.config.get("hidden_size")
    return {
        "parent_model": details.parent,
        "format": details.format,
        "family": details.architecture,
        "families": [details.architecture],
        "parameter_size": format_count(details.parameters),
        "quantization_level": details.quantization or "unknown",
        "context_length": details.context_length,
        "embedding_length": size if isinstance(size, int) else 0,
    }


def render_tags(models: Sequence[ModelDetails]) -> JsonObject:
    """Builds the list of installed models, newest first."""
    newest_first = sorted(models, key=lambda details: -details.modified)
    return {"models": [_render_tag(details) for details in newest_first]}


def _render_tag(details: ModelDetails) -> JsonObject:
    return {
        "name": add_tag(details.name),
        "model": add_tag(details.name),
        "modified_at": _format_seconds(details.modified),
        "size": details.size,
        "digest": details.digest,
        "details": render_details(details),
        "capabilities": sorted(details.capabilities),
    }


def render_running(states: Sequence[ModelState], models: Mapping[str, ModelDetails]) -> JsonObject:
    """Builds the list of loaded models, latest expiry first."""
    loaded = [
        state for state in states if state.phase in ("ready", "stalled") and state.name in models
    ]
    loaded.sort(key=lambda state: -(math.inf if state.expires_at is None else state.expires_at))
    return {"models": [_render_loaded(state, models[state.name]) for state in loaded]}


def _render_loaded(state: ModelState, details: ModelDetails) -> JsonObject:
    size = state.stats.allocated_bytes or details.size
    on_cpu = state.backend is not None and state.backend.device == "cpu"
    expires = NEVER if state.expires_at is None else _format_seconds(state.expires_at)
    return {
        "name": add_tag(details.name),
        "model": add_tag(details.name),
        "size": size,
        "digest": details.digest,
        "details": render_details(details),
        "expires_at": expires,
        "size_vram": 0 if on_cpu else size,
        "context_length": state.context_length or details.context_length,
    }


def render_show(
    requested: str, details: ModelDetails, tensors: Sequence[TensorDetails] | None
) -> JsonObject:
    """Builds the description of one model. requested: the name that the client used, which Copilot
    displays. tensors: None omits them."""
    template = details.template
    if "insert" in details.capabilities:
        template = _INSERT_MARK + template
    parameters = "\n".join(f"{name:<30} {value}" for name, value in _iter_parameters(details))
    return {
        "license": details.license,
        "modelfile": _render_modelfile(details),
        "parameters": parameters,
        "template": template,
        "system": details.system,
        "messages": [{"role": role, "content": content} for role, content in details.messages],
        "details": render_details(details),
        "model_info": _render_model_info(requested, details),
        "capabilities": sorted(details.capabilities),
        "modified_at": _format_seconds(details.modified),
        "projector_info": {},
        **({} if tensors is None else {"tensors": [_render_tensor(one) for one in tensors]}),
    }


def _render_tensor(tensor: TensorDetails) -> JsonObject:
    return {"name": tensor.name, "type": tensor.dtype, "shape": list(tensor.shape)}


def _render_model_info(requested: str, details: ModelDetails) -> dict[str, Any]:
    """Builds `model_info`. The keys are prefixed with the value of general.architecture, because
    clients read the context length from the prefixed key."""
    prefix = details.architecture
    info: dict[str, Any] = {
        "general.architecture": prefix,
        "general.basename": requested,
        "general.parameter_count": details.parameters,
        f"{prefix}.context_length": details.context_length,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": None,
        "tokenizer.ggml.merges": None,
    }
    for key, name in _CONFIG_KEYS.items():
        value = details.config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            info[f"{prefix}.{name}"] = value
    return info


def _iter_parameters(details: ModelDetails) -> Iterator[tuple[str, str]]:
    """Yields the names and values of `parameters`. Continue uses num_ctx."""
    yield "num_ctx", str(details.context_length)
    for knob in SAMPLING_KNOBS:
        value = details.defaults.get(knob.name)
        if value is not None:
            yield (
                knob.runner_name or knob.name,
                f"{value:g}" if isinstance(value, float) else str(value),
            )
    if details.max_tokens is not None:
        yield "num_predict", str(details.max_tokens)
    for text in details.stop:
        yield "stop", _quote(text)


def _render_modelfile(details: ModelDetails) -> str:
    lines = [
        "# Modelfile generated by mlxrunner",
        f"FROM {add_tag(details.parent or details.name)}",
    ]
    lines += [f"PARAMETER {name} {value}" for name, value in _iter_parameters(details)]
    lines += [f"SYSTEM {_quote(details.system)}"] if details.system else []
    lines += [f"MESSAGE {role} {_quote(content)}" for role, content in details.messages]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return orjson.dumps(text).decode()


def _format_seconds(seconds: float) -> str:
    """Formats a Unix time with at most six digits of a second, which Python 3.10 can parse."""
    return format_time(int(seconds * _NANOSECONDS))[:26] + "Z"
