"""Summarizes the tensors of a model: names, parameter counts and storage formats.

Knows: safetensors headers, which models are GGUF files, how MLX and Ollama pack quantized weights.
Must not know: architectures.

MLX stores the scales of `X.weight` as `X.scales`, Ollama as `X.weight.scale`. Each scale belongs to
a group of parameters, so the number of parameters in a packed weight follows from the number of
scales.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.core.model_files import Json, ModelFiles
from app.core.models import TensorDetails
from app.store import safetensors_header
from app.store.config_files import as_object
from app.store.gguf import summary
from app.store.gguf.model import is_gguf_model
from app.store.safetensors_header import SafetensorsHeader, TensorInfo

# the group size by format name; 64 for other formats
_GROUP_SIZES: Mapping[str, int] = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
_DEFAULT_GROUP_SIZE = 64

_SCALE_SUFFIXES = (".scales", ".weight.scale")
_OFFSET_SUFFIXES = (".biases", ".weight.bias", ".weight.global_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSummary:
    """A summary of a model's tensors. parameters: the number of parameters. quantization: the
    format of most parameters, such as "int4" or "BF16"."""

    parameters: int
    quantization: str


def list_tensors(files: ModelFiles) -> tuple[TensorDetails, ...]:
    """Returns the tensors of a model. Raises AppError(MODEL_FILES)."""
    if is_gguf_model(files):
        return tuple(summary.list_tensors(files.shards[0]))
    return tuple(
        TensorDetails(name=name, dtype=tensor.dtype, shape=tensor.shape)
        for shard in files.shards
        for name, tensor in safetensors_header.read(shard).tensors.items()
    )


def summarize_tensors(files: ModelFiles) -> TensorSummary:
    """Counts the parameters of a model. Raises AppError(MODEL_FILES)."""
    if is_gguf_model(files):
        parameters, quantization = summary.count_parameters(files.shards[0])
        return TensorSummary(parameters=parameters, quantization=quantization)
    counts: Counter[str] = Counter()
    for shard in files.shards:
        for kind, count in _count_shard(safetensors_header.read(shard), files.config):
            counts[kind] += count
    most_common = counts.most_common(1)
    return TensorSummary(
        parameters=counts.total(), quantization=most_common[0][0] if most_common else ""
    )


def _count_shard(header: SafetensorsHeader, config: Json) -> Iterator[tuple[str, int]]:
    """Yields the format and the number of parameters of each weight. If the scales of a packed
    weight are in another shard, the number of parameters is computed from the configured bits."""
    for name, tensor in header.tensors.items():
        if name.endswith((*_SCALE_SUFFIXES, *_OFFSET_SUFFIXES)):
            continue
        module = name.removesuffix(".weight")
        scales = next(
            (
                header.tensors[n]
                for suffix in _SCALE_SUFFIXES
                if (n := module + suffix) in header.tensors
            ),
            None,
        )
        if tensor.dtype != "U32" and scales is None:
            yield tensor.dtype, tensor.num_elements
            continue
        yield _count_packed(tensor, scales, _read_format(module, name, header, config))


def _count_packed(
    tensor: TensorInfo, scales: TensorInfo | None, packing: Mapping[str, Any]
) -> tuple[str, int]:
    mode = packing.get("mode") or "affine"
    if scales is None:
        bits = packing.get("bits") or 4
        return _format_name(mode, bits), tensor.nbytes * 8 // bits
    group = packing.get("group_size") or _GROUP_SIZES.get(mode, _DEFAULT_GROUP_SIZE)
    count = scales.num_elements * group
    return _format_name(mode, round(tensor.nbytes * 8 / max(count, 1))), count


def _format_name(mode: str, bits: int) -> str:
    return f"int{bits}" if mode == "affine" else mode


def _read_format(
    module: str, name: str, header: SafetensorsHeader, config: Json
) -> Mapping[str, Any]:
    """Returns the mode, group size and bits of a packed weight, as far as the files specify
    them."""
    metadata = header.metadata
    kind = metadata.get(f"{name}.quant_type") or metadata.get("quant_type")
    group = metadata.get(f"{name}.group_size") or metadata.get("group_size")
    if kind is not None:
        mode = kind if kind in _GROUP_SIZES else "affine"
        size = int(group) if group is not None and group.isdecimal() else None
        return {"mode": mode, "group_size": size}
    general = as_object(config.get("quantization"))
    return {**general, **as_object(general.get(module))}
