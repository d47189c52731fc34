"""The type of the layer caches and the bits of activations, chosen from the checkpoint."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app import store
from app.core.errors import AppError
from app.core.model_files import ModelFiles
from app.core.settings import CachePolicy, KVPrecision, Settings
from app.engine import precision
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.model_info import complete_config
from app.engine.precision import choose_activation_bits, choose_kv_dtype
from app.engine.weights import open_model
from tests import tiny
from tests.engine.harness import (
    ScheduledJob,
    job,
    make_loop,
    run_one,
    run_schedule,
    tiny_model,
    token_bits,
)
from tests.models.kernel_switch import BOTH, use_kernels

PROMPT = tuple(b"a prompt that is long enough for several chunks of eight tokens")


def zeros(dtype: mx.Dtype, size: int) -> mx.array:
    return mx.zeros((size,), dtype)


# parameters, the type of the caches, and the bits of activations
CHECKPOINTS: dict[str, tuple[list[mx.array], mx.Dtype | None, int]] = {
    "float32": ([zeros(mx.float32, 100)], None, 24),
    "bfloat16 with float32 norms": (
        [zeros(mx.bfloat16, 100), zeros(mx.float32, 10)], mx.bfloat16, 16),
    "float16": ([zeros(mx.float16, 100)], mx.float16, 16),
    "packed words with bfloat16 scales": (
        [zeros(mx.uint32, 500), zeros(mx.bfloat16, 60), zeros(mx.float32, 8)], mx.bfloat16, 16),
    "packed words with float32 scales": (
        [zeros(mx.uint32, 500), zeros(mx.float32, 60)], None, 24),
    "one-byte scales, other tensors in bfloat16": (
        [zeros(mx.uint8, 500), zeros(mx.bfloat16, 60)], mx.bfloat16, 16),
    "no floats": ([zeros(mx.uint8, 500)], None, 24),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_auto_selects_the_type_of_most_parameters(name: str) -> None:
    parameters, expected, bits = CHECKPOINTS[name]
    # compared as text, because a type cannot be compared with None
    assert str(choose_kv_dtype(parameters, "auto")) == str(expected)
    assert choose_kv_dtype(parameters, "bfloat16") == mx.bfloat16
    assert choose_activation_bits(parameters, has_blocks=False) == bits
    assert choose_activation_bits(parameters, 8, has_blocks=True) == 8


def test_blocks_of_gguf_have_16_bit_activations_beside_float32_norms() -> None:
    parameters = [zeros(mx.uint8, 500), zeros(mx.float32, 60)]
    assert choose_activation_bits(parameters, has_blocks=True) == 16


def test_auto_keeps_the_activations_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert choose_kv_dtype([zeros(mx.bfloat16, 100)], "auto") is None


def write_model(folder: Path, dtype: mx.Dtype, scale: float = 1.0) -> ModelFiles:
    """scale: of the value projection of the first layer."""
    tiny.write(folder)
    weights = {name: array.astype(dtype) for name, array in tiny.weights().items()}
    weights["model.layers.0.self_attn.v_proj.weight"] *= scale
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return complete_config(store.find(str(folder)))


def open_loop(files: ModelFiles, **changes: Any) -> Loop:
    return load(files, Settings(parallel=1, context=300, **changes), lambda _done, _bytes: None)


@pytest.mark.parametrize(
    ("dtype", "kv", "expected"),
    [
        (mx.float32, "auto", "float32"),
        (mx.bfloat16, "auto", "bfloat16"),
        (mx.float16, "auto", "float16"),
        (mx.bfloat16, "float32", "float32"),
        (mx.float32, "float16", "float16"),
        (mx.float16, "bfloat16", "bfloat16"),
    ],
)
def test_a_loaded_engine_reports_the_type_and_pays_for_it(
    tmp_path: Path, dtype: mx.Dtype, kv: KVPrecision, expected: str
) -> None:
    loop = open_loop(write_model(tmp_path / "m", dtype), kv=kv)
    size = 4 if expected == "float32" else 2
    # two layers of keys and values, two heads of four numbers, in steps of 256 positions
    assert (loop.capacity.kv_dtype, loop.capacity.kv_bytes_per_sequence) == (
        expected, 2 * 2 * 2 * 4 * size * 512)  # fmt: skip


@pytest.mark.parametrize("cache", ["radix", "single", "slots"])
def test_cached_prefixes_and_running_sequences_count_with_the_type_of_the_caches(
    tmp_path: Path, cache: CachePolicy
) -> None:
    files = write_model(tmp_path / "m", mx.bfloat16)
    charged: dict[KVPrecision, tuple[int, int]] = {}
    for kv in ("float32", "auto"):
        loop = open_loop(files, kv=kv, cache=cache)
        loop.submit(job("one", PROMPT, stop_token_ids=frozenset[int]()))
        loop.step()
        running = loop.stats().ledger.kv
        while not loop.idle:
            loop.step()
        charged[kv] = running, loop.stats().ledger.prefix
    assert min(charged["auto"]) > 0
    assert charged["float32"] == tuple(2 * count for count in charged["auto"])


@pytest.mark.parametrize("scale", [1e5, float("nan")])
def test_float16_is_not_used_if_numbers_are_too_large(tmp_path: Path, scale: float) -> None:
    """They would be stored as its largest number."""
    files = write_model(tmp_path / "m", mx.bfloat16, scale)
    with pytest.raises(AppError, match="use --kv bfloat16 or --kv float32"):
        open_loop(files, kv="float16")
    assert open_loop(files, kv="bfloat16").capacity.kv_dtype == "bfloat16"


def test_auto_falls_back_to_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the same checkpoint are too large for a smaller range."""
    files = write_model(tmp_path / "m", mx.float16)
    assert open_loop(files).capacity.kv_dtype == "float16"
    monkeypatch.setattr(precision, "_USABLE_RANGE", 0.5)
    loop = open_loop(files)
    assert loop.capacity.kv_dtype == "float32"
    assert loop.capacity.kv_bytes_per_sequence == 2 * 2 * 2 * 4 * 4 * 512


def test_ranks_do_not_use_float16_unless_it_is_requested() -> None:
    model = tiny_model()
    model.kv_dtype = mx.float16
    precision.avoid_float16(model, "float16")
    assert model.kv_dtype == mx.float16
    precision.avoid_float16(model, "auto")
    assert model.kv_dtype is None


def test_a_float32_cache_gives_the_bits_of_a_model_without_the_setting(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m", mx.bfloat16)
    request = job("one", PROMPT)
    exact = run_one(open_loop(files, kv="float32"), request)
    rounded = run_one(open_loop(files), request)
    assert token_bits(exact) != token_bits(rounded), "bfloat16 keys change the log probabilities"
    # as without this setting
    model = open_model(files, None)
    model.kv_dtype = None
    assert token_bits(run_one(make_loop(model, chunk=128), request)) == token_bits(exact)


@pytest.mark.parametrize("by_kernels", BOTH)
@pytest.mark.parametrize("kv", [mx.bfloat16, mx.float16], ids=str)
def test_cached_and_batched_answers_have_the_bits_of_answers_alone(
    kv: mx.Dtype, by_kernels: bool
) -> None:
    """With the kernels for any chunks; without them with --exact."""
    with use_kernels(enabled=by_kernels):
        model = tiny_model()
        model.kv_dtype = kv
        options: dict[str, Any] = {} if by_kernels else {"exact": True}
        alone = run_one(make_loop(model, **options), job("alone", PROMPT))
        loop = make_loop(model, policy="radix", running=3 if by_kernels else 1, **options)
        names = ("first", "second", "third")
        got = run_schedule(
            loop, [ScheduledJob(job=job(n, PROMPT), at=i) for i, n in enumerate(names)]
        )
        again = run_one(loop, job("again", PROMPT))
        assert again.cached > 0
        for outcome in (*got.values(), again):
            assert token_bits(outcome) == token_bits(alone)
        if by_kernels:
            chunked = run_one(make_loop(model, chunk=5), job("chunked", PROMPT))
            assert token_bits(chunked) == token_bits(alone)
