"""Translates the GGUF files of Ollama's own converter to llama.cpp's terms.

Knows: the names of architectures, keys and tensors that differ (ollama/ollama, convert/ and
llama/compat/), and the tensors of vision towers and other modules in the same file. Must not know:
our configs, MLX, the values of tensors.

Ollama's engine had its own names for some models, which many files in its library still use. A file
of llama.cpp is returned as it is, apart from the tensors of other modules.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from models.gguf import reader
from models.gguf.reader import Array, GGUFFile, GGUFTensor, Value

_ARCHITECTURE, _PRE = "general.architecture", "tokenizer.ggml.pre"
_TOKENIZER, _TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"

# the first part of the names of tensors that do not belong to the language model
_MODULES: Mapping[str, str] = {
    "v.": "vision tower",
    "model.vision_tower.": "vision tower",
    "s.": "vision tower",
    "mm.": "projector",
    "a.": "audio encoder",
    "mtp.": "layers for multi-token prediction",
}

# the context lengths from which Gemma 3 scales rotary frequencies, although no key gives the factor
_GEMMA3_CONTEXT, _GEMMA3_FACTOR = 131_072, 8.0

# the token IDs of Llama 3 in files that do not name the rules for splitting text
_LLAMA3_TOKENS: Mapping[int, bytes] = {128006: b"<|start_header_id|>", 128009: b"<|eot_id|>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """How the files of one of Ollama's architectures differ. name: llama.cpp's name of the
    architecture. keys: keys without the architecture, and llama.cpp's names for them. tensors:
    parts of the names of tensors, and what replaces them. pre: the rules for splitting text; if the
    file has different ones, those are wrong."""

    name: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    pre: str | None = None


_SSM_STEPS = {".ssm_dt": ".ssm_dt.bias"}
_SECTIONS = {"rope.mrope_section": "rope.dimension_sections"}

# the frequencies of each axis of M-RoPE in published models, if no key has them
_QWEN2_5_VL_SECTIONS, _QWEN3_VL_SECTIONS = (16, 24, 24), (24, 20, 20)

_VARIANTS: Mapping[str, _Variant] = {
    "gptoss": _Variant(
        name="gpt-oss",
        tensors={
            ".attn_out.weight": ".attn_output.weight",
            ".attn_out.bias": ".attn_output.bias",
            ".attn_sinks": ".attn_sinks.weight",
            ".ffn_norm.weight": ".post_attention_norm.weight",
        },
        pre="gpt-4o",
    ),
    "glm4moelite": _Variant(name="deepseek2", pre="glm4"),
    "olmo3": _Variant(name="olmo2"),
    "qwen25vl": _Variant(name="qwen2vl", keys=_SECTIONS),
    "qwen3vl": _Variant(keys=_SECTIONS),
    "qwen3vlmoe": _Variant(keys=_SECTIONS),
    "nemotron_h_omni": _Variant(
        name="nemotron_h_moe",
        tensors={
            ".ffn_latent_in.weight": ".ffn_latent_down.weight",
            ".ffn_latent_out.weight": ".ffn_latent_up.weight",
        },
    ),
    "nemotron_h_moe": _Variant(
        tensors={
            ".ffn_latent_in.weight": ".ffn_latent_down.weight",
            ".ffn_latent_out.weight": ".ffn_latent_up.weight",
        },
    ),
    "gemma3": _Variant(
        keys={
            "rope.global.freq_base": "rope.freq_base",
            "rope.local.freq_base": "rope.freq_base_swa",
        }
    ),
    "gemma4": _Variant(tensors={".ffn_gate_inp.per_expert_scale": ".ffn_down_exps.scale"}),
    "mistral3": _Variant(
        keys={
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        }
    ),
    "qwen35": _Variant(tensors=_SSM_STEPS),
    "qwen35moe": _Variant(tensors=_SSM_STEPS),
    "qwen3next": _Variant(tensors=_SSM_STEPS),
}


def read_model(path: Path) -> GGUFFile:
    """Reads the header of a language model, in llama.cpp's terms. path: see `reader.read`, which
    also raises the same errors."""
    return translate(reader.read(path))


def list_other_modules(file: GGUFFile, *, vision: bool = False) -> Sequence[str]:
    """Returns what a file contains in addition to the language model. vision: whether its vision
    tower is also used."""
    used = ("vision tower", "projector") if vision else ()
    found = (_find_module(name) for name in file.tensors)
    return sorted({module for module in found if module is not None and module not in used})


def translate(file: GGUFFile) -> GGUFFile:
    """Returns the same model in llama.cpp's terms, without other modules."""
    original = file.metadata.get(_ARCHITECTURE)
    variant = _VARIANTS.get(original) if isinstance(original, str) else None
    tensors = {name: tensor for name, tensor in file.tensors.items() if _find_module(name) is None}
    metadata = dict(file.metadata)
    if variant is not None and isinstance(original, str):
        name = variant.name or original
        metadata = _rename_keys(metadata, original, name, variant.keys)
        tensors = {
            new: replace(tensor, name=new)
            for tensor in tensors.values()
            for new in (_rename_tensor(tensor.name, variant.tensors),)
        }
        if variant.pre is not None:
            metadata[_PRE] = variant.pre
        metadata |= _complete(original, name, metadata, tensors, file)
    if metadata.get(_PRE) in (None, "", "default"):
        metadata |= _find_rules(metadata)
    return replace(file, metadata=metadata, tensors=tensors)


def _find_module(tensor: str) -> str | None:
    return next((name for prefix, name in _MODULES.items() if tensor.startswith(prefix)), None)


def _rename_keys(
    metadata: Mapping[str, Value], original: str, name: str, keys: Mapping[str, str]
) -> dict[str, Value]:
    """Returns the metadata with llama.cpp's keys. A key that the file has itself is kept."""
    renamed: dict[str, Value] = {}
    kept = dict(metadata)
    for key, value in metadata.items():
        own = key.removeprefix(f"{original}.")
        if own != key and (new := f"{name}.{keys.get(own, own)}") != key:
            del kept[key]
            renamed[new] = value
    return {**renamed, **kept, _ARCHITECTURE: name}


def _rename_tensor(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _complete(
    original: str,
    name: str,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, GGUFTensor],
    file: GGUFFile,
) -> Mapping[str, Value]:
    """Returns the values of keys that the files of an architecture lack."""

    def missing(**values: Value | None) -> dict[str, Value]:
        named = {f"{name}.{key.replace('__', '.')}": value for key, value in values.items()}
        return {
            key: value for key, value in named.items() if value is not None and key not in metadata
        }

    def rows(suffix: str) -> int | None:
        found = (t.shape for key, t in tensors.items() if key.endswith(suffix))
        return next((shape[-2] for shape in found if len(shape) > 1), None)

    match original:
        case "gptoss":
            return missing(
                expert_feed_forward_length=rows(".ffn_gate_exps.weight"),
                rope__scaling__type="yarn",
            )
        case "glm4moelite":  # the sizes of a head are in llama.cpp's keys with _mla
            return missing(
                attention__key_length_mla=metadata.get(f"{name}.attention.key_length"),
                attention__value_length_mla=metadata.get(f"{name}.attention.value_length"),
            )
        case "nemotron_h_moe" | "nemotron_h_omni":
            return missing(moe_latent_size=rows(".ffn_latent_down.weight"))
        case "gemma3" if len(tensors) < len(file.tensors):
            context = metadata.get("gemma3.context_length")
            if isinstance(context, int) and context >= _GEMMA3_CONTEXT:
                return missing(rope__scaling__type="linear", rope__scaling__factor=_GEMMA3_FACTOR)
        case "qwen25vl":
            return missing(rope__dimension_sections=_make_sections(_QWEN2_5_VL_SECTIONS))
        case "qwen3vl" | "qwen3vlmoe":
            return missing(
                expert_feed_forward_length=rows(".ffn_gate_exps.weight"),
                rope__dimension_sections=_make_sections(_QWEN3_VL_SECTIONS),
            )
        case "gemma4":
            if metadata.get(_TOKENIZER) == "llama" and "tokenizer.ggml.merges" in metadata:
                return {_TOKENIZER: "gemma4"}
        case _:
            pass
    return {}


def _make_sections(numbers: Sequence[int]) -> Array:
    data = struct.pack(f"<{len(numbers)}i", *numbers)
    return Array(kind="i32", count=len(numbers), data=memoryview(data))


def _find_rules(metadata: Mapping[str, Value]) -> Mapping[str, Value]:
    """Returns the rules for splitting text for a model that has no others, if the file does not
    name them."""
    if metadata.get(_TOKENIZER) != "gpt2":
        return {}
    if metadata.get(_ARCHITECTURE) == "mistral3":
        return {_PRE: "tekken"}
    tokens = metadata.get(_TOKENS)
    if isinstance(tokens, Array) and tokens.kind == "string" and tokens.count > max(_LLAMA3_TOKENS):
        texts = tokens.strings()
        if all(texts[id] == text for id, text in _LLAMA3_TOKENS.items()):
            return {_PRE: "llama-bpe"}
    return {}
