"""Ollama's names of common models, names in the same form of some that Ollama lacks, and these
models in MLX's format on the Hugging Face hub.

Knows: the table of names. Must not know: the network, the installed models.

A tag is the size of the model, as in Ollama. Ollama's own files are in GGUF; for a download, a name
selects the repository with 4-bit weights of the same model in MLX's format. The suffix of a tag
selects other weights: `-q8_0` the 8-bit ones, `-fp16` those with 16 bits. The repositories belong
to the organization mlx-community, except for those that name another one. No repository was
downloaded to check this table.
"""

import difflib
import re
from collections.abc import Mapping, Sequence

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.store.model_names import (
    DEFAULT_HOST,
    DEFAULT_NAMESPACE,
    DEFAULT_TAG,
    HubName,
    OllamaName,
    parse_hub_name,
    parse_ollama_name,
)

_ORGANIZATION = "mlx-community"

# the end of a repository's name, and of Ollama's tags with weights in this format
_FORMATS: Mapping[str, Sequence[str]] = {
    "4bit": ("q4_0", "q4_1", "q4_k_m", "q4_k_s"),
    "8bit": ("q8_0",),
    "bf16": ("fp16", "bf16"),
}

_DEFAULT_FORMAT = "4bit"

# a tag: the size, words such as `instruct`, and the format of the weights
_TAG = re.compile(r"(?P<size>.+?)(?:-(?:instruct|it|chat))?(?:-(?P<format>(?:q\d|fp16|bf16)\w*))?")

_MAX_SUGGESTIONS = 3

# name -> tag -> repository; the first tag is also `latest`. A string is a repository of
# mlx-community without the format at its end. A mapping has the repository, or the folder of a
# repository, of each format, where the names are irregular or not every format is known to exist;
# repositories without an organization belong to mlx-community. The format "" matches any.
LIBRARY: Mapping[str, Mapping[str, str | Mapping[str, str]]] = {
    "bonsai": {
        "27b": {"": "prism-ml/Ternary-Bonsai-27B-mlx-2bit"},
        "1.7b": {"": "prism-ml/Ternary-Bonsai-1.7B-mlx-2bit"},
        "8b": {"": "prism-ml/Ternary-Bonsai-8B-mlx-2bit"},
    },
    "bonsai2": {
        "27b": {"": "prism-ml/Ternary-Bonsai-2-27B-mlx-2bit"},
        "2b": {"": "prism-ml/Ternary-Bonsai-2-2B-mlx-2bit"},
        "4b": {"": "prism-ml/Ternary-Bonsai-2-4B-mlx-2bit"},
        "9b": {"": "prism-ml/Ternary-Bonsai-2-9B-mlx-2bit"},
    },
    "codestral": {"22b": "Codestral-22B-v0.1"},
    "deepseek-coder-v2": {"16b": {"4bit": "DeepSeek-Coder-V2-Lite-Instruct-4bit-mlx"}},
    "deepseek-r1": {
        "8b": "DeepSeek-R1-0528-Qwen3-8B",
        "1.5b": "DeepSeek-R1-Distill-Qwen-1.5B",
        "7b": "DeepSeek-R1-Distill-Qwen-7B",
        "14b": "DeepSeek-R1-Distill-Qwen-14B",
        "32b": "DeepSeek-R1-Distill-Qwen-32B",
        "70b": "DeepSeek-R1-Distill-Llama-70B",
    },
    "devstral": {"24b": "Devstral-Small-2507"},
    "devstral-small-2": {"24b": {"4bit": "Devstral-Small-2-24B-Instruct-2512-4bit"}},
    "embeddinggemma": {"300m": {"8bit": "embeddinggemma-300m-8bit"}},
    "gemma2": {"9b": "gemma-2-9b-it", "2b": "gemma-2-2b-it", "27b": "gemma-2-27b-it"},
    "gemma3": {
        "4b": "gemma-3-4b-it",
        "270m": "gemma-3-270m-it",
        "1b": "gemma-3-1b-it",
        "12b": "gemma-3-12b-it",
        "27b": "gemma-3-27b-it",
        "1b-it-qat": {"4bit": "gemma-3-1b-it-qat-4bit"},
        "4b-it-qat": {"4bit": "gemma-3-4b-it-qat-4bit"},
        "12b-it-qat": {"4bit": "gemma-3-12b-it-qat-4bit"},
        "27b-it-qat": {"4bit": "gemma-3-27b-it-qat-4bit"},
    },
    "gemma3n": {
        "e4b": {"4bit": "lmstudio-community/gemma-3n-E4B-it-MLX-4bit"},
        "e2b": {"4bit": "gemma-3n-E2B-it-4bit"},
    },
    "gemma4": {
        "e4b": {"4bit": "gemma-4-e4b-it-4bit", "8bit": "gemma-4-e4b-it-8bit"},
        "e2b": {"4bit": "gemma-4-e2b-it-4bit", "8bit": "gemma-4-e2b-it-8bit"},
        "12b": {"4bit": "gemma-4-12B-it-4bit", "8bit": "gemma-4-12B-it-8bit"},
        "26b": {"4bit": "gemma-4-26b-a4b-it-4bit", "8bit": "gemma-4-26B-A4B-it-8bit"},
        "31b": {"4bit": "gemma-4-31b-it-4bit", "8bit": "gemma-4-31b-it-8bit"},
        "12b-it-qat": {"4bit": "gemma-4-12B-it-qat-4bit", "8bit": "gemma-4-12B-it-qat-8bit"},
        "26b-it-qat": {"4bit": "gemma-4-26B-A4B-it-qat-4bit"},
        "31b-it-qat": {"4bit": "gemma-4-31B-it-qat-4bit", "8bit": "gemma-4-31B-it-qat-8bit"},
    },
    "glm-4.5-air": {"106b": {"4bit": "GLM-4.5-Air-4bit"}},
    "glm-4.7-flash": {"30b": "GLM-4.7-Flash"},
    "gpt-oss": {"20b": {"": "gpt-oss-20b-MXFP4-Q8"}, "120b": {"": "gpt-oss-120b-MXFP4-Q8"}},
    "gpt-oss-safeguard": {"20b": {"": "lmstudio-community/gpt-oss-safeguard-20b-MLX-MXFP4"}},
    "granite4": {
        "micro-h": {"4bit": "granite-4.0-h-micro-4bit"},
        "tiny-h": {"4bit": "granite-4.0-h-tiny-4bit"},
    },
    "granite4.2": {
        "8b": {
            "4bit": "ibm-granite/granite-4.2-8b-q4-mlx",
            "8bit": "ibm-granite/granite-4.2-8b-q8-mlx",
        },
        "3b": {
            "4bit": "ibm-granite/granite-4.2-3b-q4-mlx",
            "8bit": "ibm-granite/granite-4.2-3b-q8-mlx",
        },
        "30b": {
            "4bit": "ibm-granite/granite-4.2-30b-q4-mlx",
            "8bit": "ibm-granite/granite-4.2-30b-q8-mlx",
        },
    },
    "hermes3": {"8b": {"4bit": "Hermes-3-Llama-3.1-8B-4bit"}},
    "hermes4": {"70b": {"4bit": "lmstudio-community/Hermes-4-70B-MLX-4bit"}},
    "holo3.1": {
        "35b": {
            "4bit": "pipenetwork/Holo-3.1-35B-A3B-MLX-4bit",
            "8bit": "pipenetwork/Holo-3.1-35B-A3B-MLX-8bit",
        }
    },
    "kimi-k2.6": {"1t": {"": "Kimi-K2.6-mlx-DQ3_K_M-q8"}},
    "lfm2": {"24b": {"4bit": "lmstudio-community/LFM2-24B-A2B-MLX-4bit"}},
    "lfm2.5": {
        "2.6b": {
            "4bit": "LiquidAI/LFM2.5-2.6B-MLX/4bit",
            "8bit": "LiquidAI/LFM2.5-2.6B-MLX/8bit",
            "bf16": "LiquidAI/LFM2.5-2.6B-MLX/bf16",
        },
        "1.2b": {"4bit": "LFM2.5-1.2B-Instruct-4bit"},
        "8b": {"4bit": "LFM2.5-8B-A1B-MLX-4bit"},
        "24b": {"4bit": "LiquidAI/LFM2.5-24B-A2B-MLX-4bit"},
    },
    "llama3": {"8b": "Meta-Llama-3-8B-Instruct", "70b": "Meta-Llama-3-70B-Instruct"},
    "llama3.1": {"8b": "Meta-Llama-3.1-8B-Instruct", "70b": "Meta-Llama-3.1-70B-Instruct"},
    "llama3.2": {"3b": "Llama-3.2-3B-Instruct", "1b": "Llama-3.2-1B-Instruct"},
    "llama3.3": {"70b": "Llama-3.3-70B-Instruct"},
    "minicpm-v4.7": {
        "1b": {"8bit": "MiniCPM-V-4.7-1B-8bit"},
        "35b": {"": "MiniCPM-V-4.7-35B-A3B-mxfp4"},
    },
    "minimax-m2.5": {"230b": {"4bit": "lmstudio-community/MiniMax-M2.5-MLX-4bit"}},
    "minimax-m2.7": {"230b": {"": "MiniMax-M2.7-4bit-mxfp4"}},
    "ministral-3": {
        "8b": "Ministral-3-8B-Instruct-2512",
        "3b": "Ministral-3-3B-Instruct-2512",
        "14b": "Ministral-3-14B-Instruct-2512",
    },
    "mistral": {"7b": "Mistral-7B-Instruct-v0.3"},
    "mistral-nemo": {"12b": "Mistral-Nemo-Instruct-2407"},
    "mistral-small": {"24b": "Mistral-Small-24B-Instruct-2501"},
    "mistral-small-4": {
        "119b": {"4bit": "Mistral-Small-4-119B-2603-4bit", "8bit": "Mistral-Small-4-119B-2603-8bit"}
    },
    "mistral-small3.1": {"24b": {"4bit": "Mistral-Small-3.1-24B-Instruct-2503-4bit"}},
    "mixtral": {"8x7b": "Mixtral-8x7B-Instruct-v0.1"},
    "muse-glimmer": {"30b": "Muse-Glimmer-30B"},
    "nanbeige4.1": {"3b": {"4bit": "Nanbeige4.1-3B-4bit"}},
    "nemotron-3-nano": {
        "30b": {"4bit": "lmstudio-community/NVIDIA-Nemotron-3-Nano-30B-A3B-MLX-4bit"}
    },
    "nemotron-3.5-lightning": {"30b": {"4bit": "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-4bit"}},
    "north-mini-code": {
        "1.0": {"4bit": "North-Mini-Code-1.0-4bit", "bf16": "North-Mini-Code-1.0-bf16"}
    },
    "olmo-3": {"7b": {"4bit": "Olmo-3-7B-Instruct-4bit"}},
    "olmo2": {"7b": "OLMo-2-1124-7B-Instruct", "13b": "OLMo-2-1124-13B-Instruct"},
    "olmo3": {"7b": {"4bit": "Olmo-3-7B-Instruct-4bit"}},
    "phi3.5": {"3.8b": "Phi-3.5-mini-instruct"},
    "phi4": {"14b": "phi-4"},
    "phi4-mini": {"3.8b": "Phi-4-mini-instruct"},
    "phi4-mini-reasoning": {"3.8b": {"4bit": "lmstudio-community/Phi-4-mini-reasoning-MLX-4bit"}},
    "qwen2.5": {
        "7b": "Qwen2.5-7B-Instruct",
        "0.5b": "Qwen2.5-0.5B-Instruct",
        "1.5b": "Qwen2.5-1.5B-Instruct",
        "3b": "Qwen2.5-3B-Instruct",
        "14b": "Qwen2.5-14B-Instruct",
        "32b": "Qwen2.5-32B-Instruct",
        "72b": "Qwen2.5-72B-Instruct",
    },
    "qwen2.5-coder": {
        "7b": "Qwen2.5-Coder-7B-Instruct",
        "0.5b": "Qwen2.5-Coder-0.5B-Instruct",
        "1.5b": "Qwen2.5-Coder-1.5B-Instruct",
        "3b": "Qwen2.5-Coder-3B-Instruct",
        "14b": "Qwen2.5-Coder-14B-Instruct",
        "32b": "Qwen2.5-Coder-32B-Instruct",
    },
    "qwen3": {
        "8b": "Qwen3-8B",
        "0.6b": "Qwen3-0.6B",
        "1.7b": "Qwen3-1.7B",
        "4b": "Qwen3-4B",
        "14b": "Qwen3-14B",
        "30b": "Qwen3-30B-A3B",
        "30b-a3b": "Qwen3-30B-A3B",
        "32b": "Qwen3-32B",
        "235b": "Qwen3-235B-A22B",
        "4b-instruct-2507": "Qwen3-4B-Instruct-2507",
        "4b-thinking-2507": "Qwen3-4B-Thinking-2507",
        "30b-a3b-instruct-2507": "Qwen3-30B-A3B-Instruct-2507",
        "30b-a3b-thinking-2507": "Qwen3-30B-A3B-Thinking-2507",
    },
    "qwen3-coder": {"30b": "Qwen3-Coder-30B-A3B-Instruct"},
    "qwen3-coder-next": {
        "80b": {
            "4bit": "Qwen3-Coder-Next-4bit",
            "8bit": "lmstudio-community/Qwen3-Coder-Next-MLX-8bit",
        }
    },
    "qwen3-embedding": {
        "8b": {"": "Qwen3-Embedding-8B-4bit-DWQ"},
        "0.6b": {"": "Qwen3-Embedding-0.6B-4bit-DWQ"},
        "4b": {"": "Qwen3-Embedding-4B-4bit-DWQ"},
    },
    "qwen3-next": {"80b": "Qwen3-Next-80B-A3B-Instruct"},
    "qwen3-vl": {
        "8b": {"4bit": "Qwen3-VL-8B-Instruct-4bit"},
        "2b": {"4bit": "Qwen3-VL-2B-Instruct-4bit"},
        "4b": {"4bit": "Qwen3-VL-4B-Instruct-4bit"},
        "30b": {"4bit": "Qwen3-VL-30B-A3B-Instruct-4bit"},
    },
    "qwen3.5": {
        "9b": "Qwen3.5-9B",
        "4b": {"4bit": "Qwen3.5-4B-MLX-4bit", "8bit": "Qwen3.5-4B-8bit"},
        "27b": {"4bit": "Qwen3.5-27B-4bit", "8bit": "Qwen3.5-27B-8bit"},
        "35b": "Qwen3.5-35B-A3B",
        "122b": "Qwen3.5-122B-A10B",
    },
    "qwen3.6": {
        "35b": "Qwen3.6-35B-A3B",
        "27b": {"4bit": "Qwen3.6-27B-4bit", "8bit": "unsloth/Qwen3.6-27B-MLX-8bit"},
    },
    "qwen3.8": {"27b": {"4bit": "rapid-mlx/Qwen3.8-27B-4bit-MTP-MLX"}},
    "qwq": {"32b": "QwQ-32B"},
    "smollm2": {
        "1.7b": "SmolLM2-1.7B-Instruct",
        "135m": "SmolLM2-135M-Instruct",
        "360m": "SmolLM2-360M-Instruct",
    },
    "smollm3": {"3b": {"4bit": "SmolLM3-3B-4bit"}},
    "tmax": {
        "9b": "Tmax-9B-MLX",
        "27b": {"4bit": "Tmax-27B-MLX-4bit", "8bit": "Tmax-27B-MLX-8bit"},
    },
    "ui-tars": {
        "7b": {"4bit": "UI-TARS-1.5-7B-4bit", "8bit": "UI-TARS-1.5-7B-8bit"},
        "72b": {"4bit": "UI-TARS-72B-DPO-4bit"},
    },
    "vibethinker": {
        "1.5b": {"4bit": "VibeThinker-1.5B-mlx-4bit"},
        "3b": {"8bit": "VibeThinker-3B-8bit"},
    },
}


def find_equivalent(text: str) -> HubName | None:
    """Returns the repository with the MLX version of a model of Ollama's library; None for any
    other name."""
    name = parse_ollama_name(text)
    return None if name is None else find_equivalent_of(name)


def find_equivalent_of(name: OllamaName) -> HubName | None:
    """Like `find_equivalent`, for a name that was parsed."""
    if (name.host, name.namespace) != (DEFAULT_HOST, DEFAULT_NAMESPACE):
        return None
    tags = LIBRARY.get(name.model.lower(), {})
    tag = name.tag.lower()
    if tag == DEFAULT_TAG:
        tag = next(iter(tags), "")
    size, format_name = tag, None
    if tag not in tags and (match := _TAG.fullmatch(tag)) is not None:
        size = match["size"]
        if match["format"] is not None:
            formats = (name for name, suffixes in _FORMATS.items() if match["format"] in suffixes)
            format_name = next(formats, "unknown")
    found = tags.get(size, {})
    if isinstance(found, str):
        found = {name: f"{found}-{name}" for name in _FORMATS}
    default = next(iter(found.values()), "") if format_name is None else ""
    repository = found.get(format_name or _DEFAULT_FORMAT, default)
    if not repository:
        return None
    return parse_hub_name(repository if "/" in repository else f"{_ORGANIZATION}/{repository}")


def resolve_hub_name(text: str) -> HubName:
    """Returns the repository that a download of this name fetches: a repository on the hub, or the
    MLX version of a model of Ollama's library. Raises AppError(MODEL_NOT_FOUND) with the most
    similar names of the table."""
    hub_name = parse_hub_name(text) or find_equivalent(text)
    if hub_name is not None:
        return hub_name
    if parse_ollama_name(text) is None:
        why = "is not a Hugging Face model name (org/name or org/name@revision)"
    else:
        why = "has no known equivalent in MLX's format"
    similar = suggest_names(text)
    hint = f"did you mean {', '.join(similar)}? Or pull" if similar else "pull"
    shown = mark_client_text(repr(text))
    message = f"{shown} {why}: {hint} a repository of the hub as org/name"
    raise AppError(ErrorKind.MODEL_NOT_FOUND, message)


def suggest_names(text: str) -> Sequence[str]:
    """Returns the names of the table that are most similar to `text`, most similar first."""
    model, colon, _ = text.lower().rpartition(":")
    if model in LIBRARY:  # only the tag is unknown
        names = [f"{model}:{tag}" for tag in LIBRARY[model]]
        return difflib.get_close_matches(text.lower(), names, _MAX_SUGGESTIONS, 0)
    names = [f"{name}:{tag}" for name, tags in LIBRARY.items() for tag in tags]
    if not colon:
        names = list(LIBRARY)
    return difflib.get_close_matches(text.lower(), names, _MAX_SUGGESTIONS)
