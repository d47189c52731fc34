"""A prefill holds no more memory than the ledger reserves, on every device, and attention computed
in pieces equals attention computed as a whole.

No GPU is needed: the device is patched in, and MLX's choice of kernels comes from a transcription
of its source (tests/models/mlx_attention.py).
"""

import gc
import importlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from app.engine.memory_profile import MemoryProfile, profile_memory
from models import attention_pieces, attention_route, kernels
from models.attention_route import AttentionDevice
from models.base import Model
from models.checkpoint_config import num_query_heads
from models.cpu_layout import apply_cpu_layout
from models.kv import KVCache, LayerCache
from models.rotating_kv import RotatingKVCache
from models.sdpa import scaled_dot_product_attention
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.kernel_switch import use_kernels
from tests.models.mlx_attention import StandInAttention
from tests.rows import rows

pytestmark = [
    pytest.mark.skipif(
        kernels.ops() is None, reason="our kernels take the place of a GPU's fused attention"
    ),
    pytest.mark.recorded,
]

CHUNK = 512
PLAIN: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "head 128": {**PLAIN, "model_type": "qwen3", "head_dim": 128},
    "head 256": {**PLAIN, "model_type": "qwen3", "head_dim": 256},
    "softcap": {
        **PLAIN,
        "model_type": "gemma2",
        "head_dim": 256,
        "sliding_window": 1024,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "latent": {
        **PLAIN,
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
    },
}


@contextmanager
def patched_device(device: AttentionDevice) -> Generator[None]:
    """The code of the models and the ledger sees this as the device."""
    with pytest.MonkeyPatch.context() as patch:
        if device is AttentionDevice.CPU:
            patch.setattr(kernels, "_module", None)
        elif device is not AttentionDevice.KERNELS:
            patch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
            patch.setattr(mx.metal, "is_available", lambda: device is AttentionDevice.METAL)
            stand_in = StandInAttention(device=device, itemsize=4)
            patch.setattr(mx.fast, "scaled_dot_product_attention", stand_in)
        yield


@contextmanager
def piece_limit(limit: int) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_route, "PIECE_BYTES", limit)
        patch.setattr(attention_route, "UNWAITED_BYTES", limit // 8)
        patch.setattr(attention_pieces, "UNWAITED_BYTES", limit // 8)
        yield


def build_family(name: str) -> Any:
    config = dict(FAMILIES[name])
    module = importlib.import_module(f"models.{config['model_type']}")
    model: Any = module.Model(module.Config.from_dict(config))
    mx.random.seed(3)
    model.update(tree_map(lambda a: mx.random.normal(a.shape) * 0.05, model.parameters()))
    mx.eval(model.parameters())
    return model


def measure(model: Model, config: Mapping[str, Any], context: int) -> tuple[MemoryProfile, int]:
    """Returns the ledger's sizes, and the bytes that the last chunk of a sequence of `context`
    positions held besides the caches."""
    heads, vocab = num_query_heads(config), config["vocab_size"]
    gc.collect()
    memory = profile_memory(
        model,
        budget=1 << 34,
        weights=0,
        chunk=CHUNK,
        max_batch_size=1,
        heads=heads,
        context=context,
    )
    kv = model.make_kv()
    for layer in kv:
        layer.reserve(context)
    tokens = mx.array([[token % vocab for token in range(CHUNK)]])
    # three chunks fill a window; the rest of a full cache may have any content
    for _ in range(3):
        mx.eval(model(tokens, kv), [layer.state() for layer in kv])
    while max(layer.offset for layer in kv) < context - CHUNK:
        if all(isinstance(layer, KVCache | RotatingKVCache) for layer in kv):
            _repeat_first_chunk(kv)
        else:
            mx.eval(model(tokens, kv), [layer.state() for layer in kv])
    gc.collect()
    # `eval` may return while the thread of the stream still holds the caches, which would be copied
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory() - sum(layer.nbytes for layer in kv)
    hidden = model(tokens, kv)
    mx.eval(hidden, [layer.state() for layer in kv])
    return memory, mx.get_peak_memory() - before - sum(layer.nbytes for layer in kv)


def _repeat_first_chunk(kv: Sequence[LayerCache]) -> None:
    for layer in kv:
        if isinstance(layer, KVCache):
            layer.append(layer.slice(0, CHUNK), 0, CHUNK)
    mx.eval([layer.state() for layer in kv])


@pytest.mark.product
@pytest.mark.parametrize("device", AttentionDevice)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_chunk_holds_no_more_than_the_ledger_reserves(name: str, device: AttentionDevice) -> None:
    """At 8,192 positions. Pieces are small here, so that every device without a fused kernel
    needs several. Without pieces, three of these families held 3.6 to 4.9 times the amount."""
    with patched_device(device), piece_limit(16 << 20):
        model = build_family(name)
        if device is AttentionDevice.KERNELS:
            apply_cpu_layout(model)
        memory, held = measure(model, FAMILIES[name], 8192)
    assert held <= memory.working
    assert memory.working < 8 * held, "the reserve would exclude models that fit"
    scores = FAMILIES[name]["num_attention_heads"] * CHUNK * 8192 * 4
    assert held < 1.25 * scores, "the scores of all heads existed at the same time"


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", AttentionDevice)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_every_architecture_holds_no_more_than_the_ledger_reserves(
    case: Case, device: AttentionDevice, tmp_path: Path
) -> None:
    parity.save_reference(case, tmp_path)
    config: Mapping[str, Any] = case.config.get("text_config", case.config)
    with patched_device(device):
        model: Any = parity.load_model(tmp_path)
        if device is AttentionDevice.KERNELS:
            apply_cpu_layout(model)
        memory, held = measure(model, {"vocab_size": case.vocab, **config}, 8192)
    # the tiny models hold less than one of the engine's other buffers: 1 MB for their allocation
    assert held <= memory.working + (1 << 20)


def draw_array(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@rows("limit", [1 << 14, 1 << 17, 1 << 20])
@rows("mask", ["causal", "array", None])
@rows("extra", ["plain", "sinks", "softcap"])
def test_pieces_equal_the_whole(limit: int, mask: str | None, extra: str) -> None:
    """To the rounding of MLX's products, which may depend on the number of rows."""
    heads, length, total = 6, 40, 100
    queries = draw_array(1, 2, heads, length, 32)
    keys, values = draw_array(2, 2, 2, total, 32), draw_array(3, 2, 2, total, 32)
    window = mx.arange(total)[None] > mx.arange(length)[:, None] + total - length - 30
    causal = mx.arange(total)[None] <= mx.arange(length)[:, None] + total - length

    def attend() -> np.ndarray:
        out = scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=0.2,
            mask=causal & window if mask == "array" else mask,  # type: ignore[arg-type]
            sinks=draw_array(4, heads) if extra == "sinks" else None,
            softcap=5.0 if extra == "softcap" else None,
        )
        return np.array(out)

    with use_kernels(enabled=False):
        whole = attend()
        with piece_limit(limit):
            pieces = attend()
    np.testing.assert_allclose(pieces, whole, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("device", [AttentionDevice.KERNELS, AttentionDevice.CPU])
def test_latent_attention_in_pieces_equals_the_whole(device: AttentionDevice) -> None:
    """With our kernels, the bits are equal, because heads are computed one by one. With MLX's
    operations, to their rounding."""
    outputs: list[np.ndarray] = []
    for limit in (1 << 30, 1 << 20):
        with patched_device(device), piece_limit(limit):
            model = build_family("latent")
            if device is AttentionDevice.KERNELS:
                apply_cpu_layout(model)
            kv = model.make_kv()
            # expanded, then absorbed: few tokens after a long context
            first = model(mx.array([list(range(300))]), kv)
            mx.eval(first)
            outputs.append(np.array(first))
            mx.eval([layer.state() for layer in kv])
            outputs.append(np.array(model(mx.array([[1, 2, 3]]), kv)))
    for whole, pieces in zip(outputs[:2], outputs[2:], strict=True):
        np.testing.assert_allclose(pieces, whole, atol=2e-5, rtol=1e-4)
    if device is AttentionDevice.KERNELS:
        np.testing.assert_array_equal(outputs[2], outputs[0])


def test_the_stand_in_refuses_to_force_a_kernel_that_does_not_exist() -> None:
    """Otherwise, the tests above could not find a wrong route."""
    stand_in = StandInAttention(device=AttentionDevice.CUDA)
    few = draw_array(1, 1, 2, 9, 256)
    with pytest.raises(ValueError, match="force_fused"):
        stand_in(few, few, few, scale=1.0, mask="causal", force_fused=True)
    stand_in(few, few, few, scale=1.0, mask="causal")
    assert [how for _, how in stand_in.calls] == ["fallback"]
