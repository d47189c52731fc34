"""Which of MLX's attention kernels computes a call on each device, transcribed from MLX's source.

The source was read at these commits, the newest stored versions near 0.32.4, and no device was
available to run it:

    Metal   mlx/backend/metal/scaled_dot_product_attention.cpp, 00703ea: `has_fused_kernel` and
            `use_fallback`
    CUDA    mlx/backend/cuda/scaled_dot_product_attention.cpp, 0569a18: `has_fused_kernel`,
            `supports_sdpa_cudnn` and `use_fallback`; scaled_dot_product_attention.cu, 08be80b:
            `supports_sdpa_vector`
    CPU     mlx/fast.cpp, 0017d3c: every call uses the fallback

`StandInAttention` behaves on a CPU as MLX does on the device: our fused CPU kernel takes the place
of the device's fused kernels, because it holds no scores either.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from models import kernels
from models.attention_route import AttentionDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The properties of a call that MLX looks at. mask: "", "causal" or "array"."""

    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    query_dim: int
    value_dim: int
    itemsize: int
    mask: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """has_fused: whether `force_fused` is accepted. falls_back: whether the default is to compute
    with several operations."""

    has_fused: bool
    falls_back: bool


def ask_mlx(device: AttentionDevice, call: Call, *, nax: bool = False) -> Answer:
    """nax: whether the GPU has neural accelerators (M5 and newer)."""
    if device is AttentionDevice.METAL:
        has = _metal_has_fused_kernel(call)
        return Answer(has_fused=has, falls_back=not has or _metal_prefers_fallback(call, nax=nax))
    if device is AttentionDevice.CUDA:
        has = _cuda_supports_cudnn(call) or _cuda_supports_vector(call)
        return Answer(has_fused=has, falls_back=not has)
    return Answer(has_fused=False, falls_back=True)


def _metal_has_fused_kernel(call: Call) -> bool:
    if call.query_length > 8:
        if call.query_dim != call.value_dim or call.query_dim not in (
            (64, 72, 80, 96, 128, 192, 256)
        ):
            return False
        return call.mask != "causal" or call.query_length <= call.key_length
    same = call.query_dim == call.value_dim and call.query_dim in (64, 96, 128, 192, 256, 512)
    if not same and (call.query_dim, call.value_dim) != (192, 128):
        return False
    if call.query_length > call.key_length:
        return False
    gqa_factor = call.query_heads // call.kv_heads
    if call.query_length * gqa_factor > 32:
        return False
    if call.query_dim == 512:
        return (
            call.query_length == 1
            and gqa_factor == 8
            and call.mask != "array"
            and call.key_length >= 1024
        )
    return True


def _metal_prefers_fallback(call: Call, *, nax: bool) -> bool:
    if (
        nax
        and call.itemsize == 2
        and call.query_length >= 1024
        and call.query_dim == 256
        and call.mask in ("causal", "array")
    ):
        return False
    if call.query_length > 8:
        return call.query_dim in (192, 256)
    return call.query_dim == call.value_dim == 192


def _cuda_supports_cudnn(call: Call) -> bool:
    """For a GPU with compute capability 8.0 or newer."""
    # while the graph is built, keys have no strides, so cuDNN is never chosen for one query
    if call.query_length == 1:
        return False
    if call.mask == "causal" and call.query_length > call.key_length:
        return False
    dims = (call.query_dim, call.value_dim)
    return call.itemsize == 2 and all(dim % 8 == 0 and dim <= 128 for dim in dims)


def _cuda_supports_vector(call: Call) -> bool:
    same = call.query_dim == call.value_dim and call.query_dim in (64, 96, 128)
    return same and call.query_length < 4 and call.mask != "array"


@dataclass(kw_only=True)
class StandInAttention:
    """Takes the place of mx.fast.scaled_dot_product_attention on a device that does not exist here.
    itemsize: the size of the numbers that the device would use. calls: the computations, and their
    methods."""

    device: AttentionDevice
    itemsize: int = 2
    calls: list[tuple[Call, str]] = field(default_factory=list[tuple[Call, str]])
    original: Any = field(default_factory=lambda: mx.fast.scaled_dot_product_attention)

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
        force_fused: bool = False,
    ) -> mx.array:
        kind = "array" if isinstance(mask, mx.array) else mask or ""
        call = Call(
            query_length=q.shape[2],
            key_length=k.shape[2],
            query_heads=q.shape[1],
            kv_heads=k.shape[1],
            query_dim=q.shape[3],
            value_dim=v.shape[3],
            itemsize=self.itemsize,
            mask=kind,
        )
        answer = ask_mlx(self.device, call)
        if force_fused and not answer.has_fused:
            raise ValueError("force_fused=True but no fused kernel is available")
        how = "fused" if force_fused or not answer.falls_back else "fallback"
        self.calls.append((call, how))
        if how == "fallback" or kind == "array":
            # our kernel has no array masks: the scores of a window are small
            return self.original(q, k, v, scale=scale, mask=mask, sinks=sinks)
        module: Any = kernels._module
        return module.attention(
            q, k, v, scale=scale, causal=kind == "causal", sinks=sinks, softcap=0.0
        )
