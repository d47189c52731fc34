"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Knows: the keys and the names of the tensors of such a file. Must not know: the model's modules.

The factors of a matrix have its name with a suffix, for example `blk.0.attn_q.weight.lora_a`. Their
rows are in the order of the converted model (models/gguf/weights.py).
"""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from models.base import ModelError
from models.gguf.architectures import find_architecture, rename_tensor
from models.gguf.metadata import Metadata
from models.gguf.reader import GGUFError, GGUFFile
from models.gguf.weights import ROTATED, UnreadTensors, split_rotated_pairs, to_floats
from models.lora import LoraFactors, foreign_tensor_error, pair_factors

_ALPHA = "adapter.lora.alpha"
_HALVES = ("a", "b")

# modules whose rows llama.cpp's converter reorders in a way that is not undone here
_REORDERED = ".linear_attn."


def read_lora_weights(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, LoraFactors]:
    """Reads the factors of an adapter, by the name of our module. config: the text model's. Raises
    GGUFError for a file that is not such an adapter, ModelError for tensors that are not supported,
    and the errors of `UnreadTensors.read`."""
    alpha = _read_alpha(file)
    architecture = find_architecture(Metadata(file))
    unread = UnreadTensors()
    halves: dict[str, dict[str, mx.array]] = {}
    for name, tensor in file.tensors.items():
        base, _, half = name.rpartition(".lora_")
        target = rename_tensor(base, architecture) if half in _HALVES else None
        if target is None or not target.endswith(".weight"):
            raise foreign_tensor_error(name)
        if _REORDERED in target or len(tensor.shape) != 2:
            raise ModelError(f"the adapter changes {base}, which is not supported in a GGUF file")
        array = to_floats(unread.add(tensor), tensor.type)
        if half == "b" and architecture.rotates_pairs and target.endswith(ROTATED):
            array = split_rotated_pairs(target, array, _count_heads(config, target))
        halves.setdefault(target.removesuffix(".weight"), {})[half] = array
    found: dict[str, LoraFactors] = {}
    for layer, both in sorted(halves.items()):
        a, b = pair_factors(layer, both)
        # llama.cpp treats an alpha of 0 as "not given"
        found[layer] = LoraFactors(a=a, b=b, scale=alpha / a.shape[0] if alpha else 1.0)
    unread.read()
    return found


def _read_alpha(file: GGUFFile) -> float:
    kind = (file.metadata.get("general.type"), file.metadata.get("adapter.type"))
    if kind != ("adapter", "lora"):
        raise GGUFError(f"{file.path} is not a LoRA adapter: its types are {kind[0]} and {kind[1]}")
    alpha = file.metadata.get(_ALPHA)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise GGUFError(f"{file.path}: {_ALPHA} is {alpha!r}, but must be a finite number")
    return float(alpha)


def _count_heads(config: Mapping[str, Any], target: str) -> int:
    heads = config["num_attention_heads"]
    return heads if ".q_proj." in target else config.get("num_key_value_heads") or heads
