"""A model's memory requirement is estimated before its weights are read."""

import gc
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache, starcoder2

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import MAX_DEFAULT_PARALLEL, KVPrecision, Settings
from app.core.units import format_memory
from app.engine import fit as fitting
from app.engine.fit import (
    TYPICAL_SEQUENCE_LENGTH,
    estimate_before_load,
    estimate_fit,
    estimate_memory,
    raise_unless_fits,
)
from app.engine.memory_profile import (
    ActivationMemory,
    KVFootprint,
    attention_shapes,
    profile_memory,
)
from app.engine.model_info import complete_config
from app.engine.precision import find_precision
from app.engine.weights import open_model
from models import architectures, llama
from models.checkpoint_config import num_query_heads
from models.image_inputs import ImageRules
from models.kv import STEP
from tests import tiny, tiny_vision
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.kernel_switch import BOTH, use_kernels
from tests.store.shards import count_bytes_read

GIB = 1 << 30
NAMES = {mx.uint32: "U32", mx.bfloat16: "BF16", mx.float32: "F32"}


def files_of(folder: Path) -> ModelFiles:
    return complete_config(store.resolve(str(folder)))


@pytest.fixture
def files(tiny_model: Path) -> ModelFiles:
    return files_of(tiny_model)


def tight_settings(files: ModelFiles, spare: int, **settings: Any) -> Settings:
    """Settings whose budget has `spare` bytes for layer caches of a context of 1024."""
    plain = estimate_fit(files, Settings(context=1024, **settings))
    return Settings(memory=plain.weights + plain.working + spare, **settings)


def sequence_bytes(files: ModelFiles, length: int) -> int:
    return estimate_fit(files, Settings(context=length)).kv_per_context


@pytest.mark.product
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_layer_caches_of_every_architecture_are_estimated_without_evaluation(
    case: Case, tmp_path: Path
) -> None:
    """The same numbers as those of a loaded model, without allocating its memory."""
    parity.save_reference(case, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    files = files_of(tmp_path)
    gc.collect()
    before = mx.get_active_memory()
    found = estimate_fit(files, Settings(prefill_chunk=16))
    gc.collect()
    assert mx.get_active_memory() - before < 65536, "something was evaluated"
    model = open_model(files, None)
    memory = profile_memory(
        model,
        budget=0,
        weights=0,
        chunk=16,
        max_batch_size=8,
        heads=num_query_heads(files.config),
        context=found.context,
    )
    assert found.kv_per_context == memory.kv_footprint(found.context)
    stored = sum(array.nbytes for _, array in _flat(model))
    assert found.weights == stored


def _flat(model: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(model.parameters())
    return flat


def test_weights_to_be_quantized_count_with_their_quantized_size(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", hidden_size=64, intermediate_size=128)
    plain, four = (estimate_fit(files_of(folder), Settings(quantize=bits)) for bits in (None, 4))
    # 4 bits, a scale and a bias in 32 bits for each 64: 5 bits of 32
    assert four.weights == pytest.approx(plain.weights * 5 / 32, rel=0.05)


def test_the_working_space_is_estimated_within_a_factor_of_two(tmp_path: Path) -> None:
    """A low estimate makes the load fail, and a high one rejects models that fit. The logits and
    scores, which are known, are excluded."""
    folder = tiny.write(tmp_path / "m", hidden_size=256, intermediate_size=768)
    files, settings = files_of(folder), Settings(context=STEP, parallel=1, prefill_chunk=512)
    model: Any = open_model(files, None)
    mx.eval(model.parameters())
    found = estimate_before_load(model, files, settings)
    heads = num_query_heads(files.config)
    # the lag of the evaluation varies, and with it the memory that is held at once
    working = max(
        profile_memory(
            model, budget=0, weights=0, chunk=512, max_batch_size=1, heads=heads, context=STEP
        ).working
        for _ in range(5)
    )
    layers = _caches(model)
    scores = ActivationMemory(
        bytes_per_token=0,
        chunk=512,
        max_batch_size=0,
        vocab=0,
        heads=heads,
        layers=layers,
        attention=attention_shapes(layers),
    )(STEP)
    assert 0.5 < (working - scores) / (found.working - scores) < 2


def _caches(model: Any) -> Any:
    layers = model.make_kv()
    mx.eval(model(mx.array([[0, 0]]), layers))
    return layers


def test_a_class_that_returns_only_logits_needs_one_row_of_them(tmp_path: Path) -> None:
    """Eight rows with a vocabulary of 256,000 would reject models that fit."""
    [case] = [case for case in cases() if case.id.startswith("starcoder2")]
    config = {**case.config, "vocab_size": 50_000}
    parity.save_reference(replace(case, config=config), tmp_path)
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    found = estimate_fit(files_of(tmp_path), Settings(context=STEP, parallel=1, prefill_chunk=64))
    assert 64 * 50_000 * 4 < found.working < 2 * 64 * 50_000 * 4


def test_the_error_for_a_class_that_cannot_run_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [case] = [case for case in cases() if case.id.startswith("starcoder2")]
    parity.save_reference(case, tmp_path)
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    more = [cache.KVCache() for _ in range(3)]
    monkeypatch.setattr(starcoder2.Model, "make_cache", lambda _: more, raising=False)
    with pytest.raises(AppError, match="does not advance by one entry per position") as caught:
        estimate_fit(files_of(tmp_path), Settings())
    assert str(tmp_path) in caught.value.message


def test_a_class_that_raises_for_its_config_gives_a_one_line_error(tmp_path: Path) -> None:
    [case] = [case for case in cases() if case.id.startswith("starcoder2")]
    parity.save_reference(case, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**case.config, "rope_theta": "many"}))
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        AppError, match=r"starcoder2 implementation fails .* TypeError: rope"
    ) as caught:
        estimate_fit(files_of(tmp_path), Settings())
    assert "\n" not in caught.value.message


def test_the_longest_context_that_fits_is_computed(files: ModelFiles) -> None:
    for steps in (1, 2, 3):
        found = estimate_fit(files, tight_settings(files, sequence_bytes(files, steps * STEP)))
        assert found.context_that_fits >= steps * STEP
        assert found.context_that_fits < files.context_length
        assert found.fits, "no context was requested, so a shorter one is used"
        used = Settings(memory=found.budget, context=found.context_that_fits)
        assert estimate_fit(files, used).fits
        more = Settings(memory=found.budget, context=found.context_that_fits + STEP)
        assert not estimate_fit(files, more).fits


def test_each_requested_sequence_has_the_full_context(files: ModelFiles) -> None:
    kv_bytes = 4 * sequence_bytes(files, 1024)
    for parallel, fits in ((4, True), (5, False)):
        settings = tight_settings(files, kv_bytes, parallel=parallel)
        found = estimate_fit(
            files, Settings(memory=settings.memory, parallel=parallel, context=1024)
        )
        assert (found.sequences, found.fits) == (parallel, fits)


def test_the_error_for_a_model_that_does_not_fit_gives_numbers_and_a_remedy(
    files: ModelFiles,
) -> None:
    budget = tight_settings(files, 2 * sequence_bytes(files, 1024)).memory
    found = estimate_fit(files, Settings(memory=budget, parallel=4, context=1024))
    with pytest.raises(AppError) as caught:
        raise_unless_fits(found, files)
    message = caught.value.message
    assert caught.value.kind is ErrorKind.MODEL_FILES
    kv = format_memory(4 * found.kv_per_context)
    assert f"{kv} for the KV cache of 4 sequences of 1024 tokens" in message
    assert f"it needs {format_memory(found.needed)}" in message
    assert f"the budget is {format_memory(found.budget)}" in message
    assert f"set --context to at most {found.context_that_fits}" in message
    assert found.needed > found.budget
    assert "or --parallel below 4" in message


def test_a_model_without_memory_for_any_context_is_rejected(
    files: ModelFiles,
) -> None:
    found = estimate_fit(files, Settings(memory=1000))
    assert (found.context_that_fits, found.fits) == (0, False)
    with pytest.raises(AppError, match=r"no context length fits, so raise --memory"):
        raise_unless_fits(found, files)


def test_the_memory_setting_overrides_the_device_budget(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "device_budget", lambda: 12345)
    assert estimate_fit(files, Settings()).budget == 12345
    assert estimate_fit(files, Settings(memory=10**9)).budget == 10**9


def test_a_folder_of_40_gb_is_estimated_from_its_headers(tmp_path: Path) -> None:
    """Llama 3.3 70B in 4 bits: real headers without data."""
    config = {
        **tiny.CONFIG,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    folder = write_hollow_model(tmp_path / "huge", config)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size > 38e9
    settings = Settings(memory=64 * GIB, context=8192, parallel=1)
    mx.reset_peak_memory()
    active, read = mx.get_active_memory(), count_bytes_read()
    found = estimate_fit(files_of(folder), settings)
    assert count_bytes_read() - read < 16 << 20
    assert mx.get_peak_memory() - active < 16 << 20
    assert found.weights == pytest.approx(size, rel=1e-4)
    # keys and values in the type of the scales
    assert found.kv_per_context == 2 * 80 * 8 * 128 * 8192 * 2
    assert found.fits
    # it does not fit in 40 GiB
    assert not estimate_fit(files_of(folder), Settings(memory=40 * GIB, context=32768)).fits


def write_hollow_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder of 4-bit weights, whose files have the size in their headers and hold no data."""
    tiny.write(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    model = llama.Model(llama.Config.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    tensors = _flat(model)
    for shard in range(8):
        header: dict[str, Any] = {}
        end = 0
        for name, array in tensors[shard::8]:
            start, end = end, end + array.nbytes
            header[name] = {
                "dtype": NAMES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        with (folder / f"model-{shard}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.parametrize("by_kernels", BOTH)
@pytest.mark.parametrize("kv", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_dtype_conversions_on_a_cpu_are_counted_to_the_byte(
    tmp_path: Path, dtype: mx.Dtype, kv: KVPrecision, by_kernels: bool
) -> None:
    """Our kernels compute with half precision weights; MLX's own are so slow with them on a CPU
    that weights are converted to float32. Keys and values are stored as `kv` says."""
    folder = tiny.write(tmp_path / "m")
    halves = {name: array.astype(dtype) for name, array in tiny.weights().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), halves)
    files = files_of(folder)
    with use_kernels(enabled=by_kernels):
        found = estimate_fit(files, Settings(context=300, kv=kv))
        model: Any = open_model(files, None, kv=kv)
        mx.eval(model.parameters())
        layers = model.make_kv()
        mx.eval(model(mx.zeros((1, 300), mx.int32), layers))
    matrix = dtype.size if by_kernels else 4
    stored = sum(array.size * (4 if array.ndim == 1 else matrix) for array in halves.values())
    assert found.weights == stored == sum(array.nbytes for _, array in _flat(model))
    assert found.kv_per_context == sum(layer.nbytes for layer in layers)
    expected = dtype if kv == "auto" else {"float32": mx.float32, "bfloat16": mx.bfloat16}[kv]
    assert find_precision(layers) == str(expected).removeprefix("mlx.core.")
    if not by_kernels:
        expected = mx.float32  # rounded, but MLX's operations read float32 fastest
    assert {array.dtype for layer in layers for array in layer.state()} == {expected}


def test_a_kv_footprint_needs_no_evaluation(files: ModelFiles) -> None:
    model = open_model(files, None)
    kv = model.make_kv()
    model(mx.array([[0]]), kv)
    # two layers of keys and values, two heads of four float32, in steps of 256 positions
    assert KVFootprint(kv, chunk=8)(300) == 2 * 2 * 2 * 4 * 4 * 512


def test_the_number_of_slots_follows_the_memory(files: ModelFiles) -> None:
    """It was at most 8, however much memory there was."""
    one = estimate_fit(files, Settings(parallel=1, memory=GIB))
    slots = list[int]()
    for count in (1, 3, 8, 32, 50, 1000):
        memory = one.needed + (count - 1) * (one.kv_per_context + 16 * tiny.VOCAB) + 1000
        found = estimate_fit(files, Settings(memory=memory))
        assert found.fits
        assert found.working == one.working + (found.slots - 1) * 16 * tiny.VOCAB
        slots.append(found.slots)
    assert slots == [1, 3, 8, 32, 50, MAX_DEFAULT_PARALLEL]
    for settings in (Settings(exact=True), Settings(cache="single")):
        assert estimate_fit(files, settings).slots == 1
    assert estimate_fit(files, Settings(parallel=100)).slots == 100


class TestMemoryRequirement:
    def test_one_typical_sequence_is_the_minimum_and_several_are_preferred(
        self, files: ModelFiles
    ) -> None:
        many = fitting.PREFERRED_SEQUENCES
        one, several = (estimate_fit(files, Settings(parallel=count)) for count in (1, many))
        found = estimate_memory(files, Settings())
        assert files.context_length == TYPICAL_SEQUENCE_LENGTH  # so that one number serves for both
        assert found.min_bytes == one.needed
        assert found.preferred_bytes == several.needed + many * several.kv_per_context
        assert found.device_budget > GIB / 4

    def test_requested_context_and_parallel_set_the_minimum(self, files: ModelFiles) -> None:
        settings = Settings(context=512, parallel=3)
        found = estimate_memory(files, settings)
        assert found.min_bytes == estimate_fit(files, settings).needed
        assert (
            found.preferred_bytes
            == found.min_bytes + 3 * estimate_fit(files, settings).kv_per_context
        )

    def test_the_memory_setting_is_used_unchanged(self, files: ModelFiles) -> None:
        found = estimate_memory(files, Settings(memory=12345))
        assert (found.min_bytes, found.preferred_bytes) == (12345, 12345)

    def test_the_minimum_is_enough_for_a_load(self, files: ModelFiles) -> None:
        for settings in (Settings(), Settings(parallel=2), Settings(context=700, parallel=2)):
            least = estimate_memory(files, settings).min_bytes
            estimate = estimate_fit(files, replace(settings, memory=least))
            assert estimate.fits


def _get_case(case_id: str) -> Case:
    return next(case for case in cases() if case.id == case_id)


@pytest.mark.parametrize(
    ("case_id", "architecture", "memory", "expected"),
    [
        ("llama-plain", "applegpu_g16s", 1 << 34, 1024),
        ("llama-plain", "applegpu_g17s", 1 << 34, 2048),
        ("llama-plain", "sm_90", 1 << 34, 1024),
        ("qwen3_moe-plain", "applegpu_g14g", 1 << 34, 2048),
        ("qwen3_5_moe-experts", "applegpu_g14g", 1 << 34, 2048),
        ("qwen3_moe-plain", "applegpu_g14g", 200_000_000, 512),
    ],
)
def test_the_default_chunk_of_a_gpu(
    case_id: str,
    architecture: str,
    memory: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used to be 512 for every model and every GPU."""
    parity.save_reference(_get_case(case_id), tmp_path)
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(fitting, "read_device_info", lambda: {"architecture": architecture})
    with use_kernels(enabled=False):
        settings = Settings(memory=memory, context=4096)
        assert estimate_fit(files_of(tmp_path), settings).prefill_chunk == expected
        fixed = Settings(memory=memory, prefill_chunk=64)
        assert estimate_fit(files_of(tmp_path), fixed).prefill_chunk == 64


def test_the_weights_of_a_vision_tower_count_unless_it_is_off(tmp_path: Path) -> None:
    """Its working memory is reserved for each image, so the activations are the same as for
    text."""
    files = files_of(tiny_vision.write(tmp_path / "vision"))
    text = estimate_fit(files, Settings(memory=1 << 30, parallel=1, vision=False))
    both = estimate_fit(files, Settings(memory=1 << 30, parallel=1))
    tower: Any = architectures.get_tower(open_model(files, None))
    parameters: Any = tree_flatten(tower.parameters())
    assert both.weights - text.weights == sum(array.nbytes for _, array in parameters)
    assert both.working == text.working


def test_a_step_has_memory_for_an_image_that_must_not_be_split(tmp_path: Path) -> None:
    files = files_of(tiny_vision.write(tmp_path / "vision"))
    settings = Settings(memory=1 << 30, parallel=1, prefill_chunk=16)
    model: Any = open_model(files, None)
    assert estimate_before_load(model, files, settings).pass_length == 16
    model.image_rules = ImageRules(atomic=True)
    split = estimate_before_load(model, files, settings)
    assert (split.prefill_chunk, split.pass_length) == (16, 280)
    given = replace(files, config={**files.config, "mm_tokens_per_image": 40})
    assert estimate_before_load(model, given, settings).pass_length == 40
    model.vision = None
    assert estimate_before_load(model, files, settings).pass_length == 16
