"""Loading: from files to a loop, with progress, or to a one-line error."""

import dataclasses
import gc
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.settings import MAX_DEFAULT_PARALLEL, ModelSettings, Settings
from app.engine import loader as loading
from app.engine import weights
from app.engine.fit import Fit, estimate_fit
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.memory_policy import WIRED_STEP
from app.engine.memory_profile import MemoryProfile, profile_memory
from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.single import SinglePrefixCache
from app.engine.prefix.slots import SlotPrefixCache
from models import kernels
from tests import tiny
from tests.engine.harness import job, run_one
from tests.models.kernel_switch import BOTH, use_kernels
from tests.models.published_weights import write_fp8

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}


needs_kernels = pytest.mark.skipif(
    kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}"
)


def ignore(percent: int, memory: int) -> None:
    assert 0 <= percent <= 100
    assert memory >= 0


def test_a_loaded_folder_generates(tiny_model: Path) -> None:
    loop = load(store.resolve(str(tiny_model)), Settings(), ignore)
    assert len(run_one(loop, job("a", b"hello")).ids) > 0


def test_weights_that_become_larger_are_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = load(store.resolve(str(write_fp8(tmp_path / "tiny"))), Settings(), ignore)
    assert len(run_one(loop, job("a", b"hello")).ids) > 0
    [line] = [record.getMessage() for record in caplog.records if "convert" in record.getMessage()]
    assert re.fullmatch(
        r"tiny: converting 14 weights from fp8 to bfloat16, because MLX has no packing with the "
        r"same numbers: [\d.]+ kB in the files, [\d.]+ kB in memory",
        line,
    )


@needs_kernels
def test_each_model_has_its_own_precision_of_activations(tmp_path: Path) -> None:
    """The capacity is what /v1/status reports."""
    files = store.resolve(str(tiny.write(tmp_path / "tiny", **SIZES)))
    models = ModelSettings(name="a", activations=8), ModelSettings(name="b")
    settings = Settings(models=models, quantize=8, activations=16)
    for model, expected in zip(models, (8, 16), strict=True):
        loop = load(files, settings.for_model(model), ignore)
        assert loop.capacity.backend is not None
        assert loop.capacity.backend.activations == expected
        assert len(run_one(loop, job("a", b"hello")).ids) > 0
    plain = load(files, Settings(), ignore).capacity.backend
    assert plain is not None
    assert plain.activations is None


def test_progress_starts_at_0_and_increases(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_REPORT_EVERY_BYTES", 4096)
    seen: list[int] = []
    load(store.resolve(str(tiny_model)), Settings(), lambda percent, _: seen.append(percent))
    assert seen[0] == 0
    assert len(seen) > 5
    assert seen == sorted(seen)


def test_shards_are_read_together(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "sharded")
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for i in range(3):
        part = {name: tensors[name] for name in names[i::3]}
        mx.save_safetensors(str(folder / f"model-{i}.safetensors"), part)
    full = tiny.write(tmp_path / "whole")
    answers = [
        run_one(load(store.resolve(str(f)), Settings(), ignore), job("a", b"hello")).ids
        for f in (folder, full)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_file_is_an_error_before_weights_are_read(tmp_path: Path, cut: int) -> None:
    folder = tiny.write(tmp_path / "model")
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut])
    with pytest.raises(AppError, match="is not a valid safetensors file") as caught:
        load(store.resolve(str(folder)), Settings(), ignore)
    assert caught.value.kind is ErrorKind.MODEL_FILES


def test_a_checkpoint_that_does_not_match_its_config_is_an_error(tmp_path: Path) -> None:
    files = store.resolve(str(tiny.write(tmp_path / "model")))
    config: dict[str, Any] = {**files.config, "num_hidden_layers": 3}
    with pytest.raises(AppError, match=r"model: the checkpoint lacks tensors: model.layers.2"):
        load(dataclasses.replace(files, config=config), Settings(), ignore)


@pytest.mark.parametrize(("device", "chunk"), [(mx.cpu, 128), (mx.gpu, 1024)])
def test_the_prefill_chunk_suits_the_device(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, device: Any, chunk: int
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    loop = load(store.resolve(str(tiny_model)), Settings(), ignore)
    assert run_one(loop, job("a", b"x" * 2000)).progress[0] == chunk


@pytest.mark.parametrize("by_kernels", BOTH)
def test_exact_mode_aligns_prefixes_where_results_depend_on_chunks(
    tiny_model: Path, by_kernels: bool
) -> None:
    settings = Settings(exact=True, prefill_chunk=8)
    with use_kernels(enabled=by_kernels):
        loop = load(store.resolve(str(tiny_model)), settings, ignore)
        prompt = b"twenty-one characters"
        run_one(loop, job("a", prompt))
        assert run_one(loop, job("b", prompt)).cached == (20 if by_kernels else 16)


@pytest.mark.parametrize("memory", [None, 20 << 30])
def test_metal_wires_the_weights_and_the_working_space_and_not_the_budget(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, memory: int | None
) -> None:
    """The whole budget was wired for the life of the process, cold prefixes included."""
    limits: list[int] = []
    info = {"max_recommended_working_set_size": 12 << 30, "memory_size": 16 << 30}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {**info, "resource_limit": 499_000})
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    settings = Settings(memory=memory, experimental_metal=True)
    loop = load(store.resolve(str(tiny_model)), settings, ignore)
    ledger = loop.stats().ledger
    assert limits == [ledger.wired]
    assert ledger.in_use <= ledger.wired < ledger.in_use + WIRED_STEP
    assert loop.capacity.wirable == 12 << 30


def test_cached_prefixes_get_a_share_of_shared_memory_unless_a_limit_is_given(
    tiny_model: Path,
) -> None:
    """Without --memory, the tree filled 0.7 of the machine."""
    files = store.resolve(str(tiny_model))
    loop = load(files, Settings(), ignore)
    assert loop.stats().ledger.prefix_limit == loop.capacity.kv_budget // 4
    limited = load(files, Settings(memory=1 << 30), ignore)
    assert limited.stats().ledger.prefix_limit == limited.capacity.kv_budget


POLICIES: list[tuple[dict[str, Any], type, int]] = [
    ({}, RadixPrefixCache, MAX_DEFAULT_PARALLEL),
    ({"parallel": 1}, SinglePrefixCache, 1),
    ({"parallel": 1, "cache": "radix"}, RadixPrefixCache, 1),
    ({"parallel": 3}, RadixPrefixCache, 3),
    ({"cache": "single"}, SinglePrefixCache, 1),
    ({"cache": "slots", "parallel": 2}, SlotPrefixCache, 2),
    ({"exact": True}, SinglePrefixCache, 1),
    ({"exact": True, "parallel": 2}, RadixPrefixCache, 2),
]


@pytest.mark.parametrize(("options", "policy", "parallel"), POLICIES)
def test_the_cache_policy_depends_on_parallel(
    tiny_model: Path, options: dict[str, Any], policy: type, parallel: int
) -> None:
    with use_kernels(enabled=False):
        loop = load(store.resolve(str(tiny_model)), Settings(**options), ignore)
    assert loop.capacity.parallel == parallel
    assert isinstance(_prefix_of(loop), policy)


def test_the_memory_for_layer_caches_can_be_fixed(tiny_model: Path) -> None:
    """The measured size of activations varies, and the rest of `memory` varies with it."""
    kv_bytes = 100_000
    loop = load(store.resolve(str(tiny_model)), Settings(parallel=2), ignore, kv_bytes=kv_bytes)
    assert loop.capacity.kv_budget == kv_bytes
    with pytest.raises(AppError, match="does not fit in memory"):
        load(store.resolve(str(tiny_model)), Settings(parallel=2), ignore, kv_bytes=1000)


def test_parallel_is_lower_where_memory_is_short(tiny_model: Path) -> None:
    files = store.resolve(str(tiny_model))
    full = load(files, Settings(), ignore)
    ledger, usual = full.stats().ledger, full.capacity.kv_bytes_per_sequence
    rows = full.capacity.parallel * 16 * tiny.VOCAB
    # half a sequence more: the working space is measured, and not to the byte
    short = ledger.weights + ledger.working - rows + 3 * usual + usual // 2
    assert load(files, Settings(memory=short), ignore).capacity.parallel == 3


def test_a_model_without_memory_for_a_sequence_is_rejected_before_it_is_read(
    tiny_model: Path,
) -> None:
    def never(percent: int, memory: int) -> None:
        raise AssertionError("something was read")

    with pytest.raises(AppError, match=r"does not fit in memory: it needs .* raise --memory"):
        load(store.resolve(str(tiny_model)), Settings(memory=1000), never)


def test_a_requested_context_is_granted_or_rejected(tiny_model: Path) -> None:
    files = store.resolve(str(tiny_model))
    ledger = load(files, Settings(context=512, parallel=1), ignore).stats().ledger
    kv = estimate_fit(files, Settings(context=512)).kv_per_context
    # the measured memory of a step differs from load to load
    memory = ledger.weights + 2 * ledger.working + kv
    assert load(files, Settings(memory=memory, context=512), ignore).capacity.context_length == 512
    default = load(files, Settings(memory=memory), ignore).capacity
    assert 0 < default.context_length < files.context_length
    assert default.limited_by_memory
    with pytest.raises(AppError, match=r"of 4096 tokens\).* set --context to at most \d+"):
        load(files, Settings(memory=memory, context=4096), ignore)


def test_a_requested_context_that_misses_by_a_byte_is_rejected_not_shortened(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate was below the measurement, and a server with --context 1500 silently served
    1024 positions."""
    files = store.resolve(str(tiny_model))

    for settings in (Settings(context=1500), Settings(context=1500, parallel=3)):
        found = estimate_fit(files, settings)

        def a_byte_more(*args: Any, found: Fit = found, **options: Any) -> MemoryProfile:
            return dataclasses.replace(profile_memory(*args, **options), working=found.working + 1)

        monkeypatch.setattr(loading, "profile_memory", a_byte_more)
        enough = dataclasses.replace(settings, memory=found.needed)
        with pytest.raises(AppError, match=r"set --context to at most \d+"):
            load(files, enough, ignore)


@pytest.mark.parametrize("error", [MemoryError("full"), RuntimeError("[malloc] no room")])
def test_a_failed_trial_pass_is_a_one_line_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(loading, "profile_memory", full)
    with pytest.raises(
        AppError, match=rf"a trial forward pass failed: {re.escape(str(error))}$"
    ) as caught:
        load(store.resolve(str(tiny_model)), Settings(), ignore)
    assert caught.value.kind is ErrorKind.MODEL_FILES


def test_working_space_is_reserved_only_for_the_context_that_fits(
    tiny_model: Path,
) -> None:
    """A CPU holds the attention scores of a prompt chunk over the whole context. Scores for a
    context that did not fit took the memory of one that did."""
    files = store.resolve(str(tiny_model))
    full = load(files, Settings(parallel=1), ignore).stats().ledger
    tight = load(files, Settings(parallel=1, memory=full.working), ignore)
    assert tight.capacity.context_length >= 512
    assert tight.stats().ledger.working < full.working


def test_weights_are_quantized_during_the_load(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", **SIZES)
    files = store.resolve(str(folder))
    ledgers = [
        load(files, Settings(quantize=bits), ignore).stats().ledger.weights for bits in (None, 8, 4)
    ]
    assert ledgers[1] < 0.3 * ledgers[0]
    assert ledgers[2] < 0.6 * ledgers[1]
    loop = load(files, Settings(quantize=8), ignore)
    assert len(run_one(loop, job("a", b"hello")).ids) > 0


def test_quantized_weights_are_not_quantized_again(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", **SIZES)
    packed: dict[str, mx.array] = {}
    for name, array in tiny.weights({**tiny.CONFIG, **SIZES}).items():
        if array.ndim == 1:
            packed[name] = array
            continue
        parts = mx.quantize(array, 64, 8)
        path = name.removesuffix(".weight")
        for part, packed_array in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{path}.{part}"] = packed_array
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    files = store.resolve(str(folder))
    load(files, Settings(), ignore)
    with pytest.raises(AppError, match=r"model: the weights are already quantized"):
        load(files, Settings(quantize=4), ignore)


@pytest.mark.parametrize(
    "error", [RuntimeError("a disk"), AppError(ErrorKind.MODEL_FILES, "a file")]
)
def test_a_failed_load_frees_its_memory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The error is kept until it is reported, and with it every frame of its traceback."""
    monkeypatch.setattr(weights, "_REPORT_EVERY_BYTES", 4096)
    files = store.resolve(str(tiny_model))
    allocated: list[int] = []

    def fail(percent: int, memory: int) -> None:
        allocated.append(memory)
        if percent > 50:
            raise error

    gc.collect()
    before, limit = mx.get_active_memory(), mx.set_cache_limit(12345678)
    try:
        with pytest.raises(type(error)) as caught:
            load(files, Settings(), fail)
        assert allocated[-1] - before > 30_000, "the load has allocated memory"
        assert mx.get_active_memory() == before
        assert caught.value.__traceback__ is not None
        assert mx.set_cache_limit(limit) == 12345678
    finally:
        mx.set_cache_limit(limit)


def test_a_rejected_checkpoint_frees_its_memory(tmp_path: Path) -> None:
    files = store.resolve(str(tiny.write(tmp_path / "model")))
    config: dict[str, Any] = {**files.config, "num_hidden_layers": 3}
    gc.collect()
    before = mx.get_active_memory()
    with pytest.raises(AppError) as caught:
        load(dataclasses.replace(files, config=config), Settings(), ignore)
    assert mx.get_active_memory() == before
    assert caught.value.__cause__ is not None


def test_the_context_setting_shortens_but_does_not_extend_the_context(tiny_model: Path) -> None:
    files = store.resolve(str(tiny_model))
    assert load(files, Settings(context=100), ignore).capacity.context_length == 100
    assert (
        load(files, Settings(context=10**6), ignore).capacity.context_length == files.context_length
    )


def _prefix_of(loop: Loop) -> object:
    return loop._scheduler._prefix  # pyright: ignore[reportPrivateUsage]  # the chosen policy
