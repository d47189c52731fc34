"""What a model takes is known before any of it is read."""

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
from app.core.settings import Settings
from app.core.units import format_memory
from app.engine import fit as fitting
from app.engine.fit import (
    TYPICAL_SEQUENCE_LENGTH,
    estimate_before_load,
    estimate_fit,
    estimate_memory,
    raise_unless_fits,
)
from app.engine.memory_profile import ActivationMemory, KVFootprint, num_query_heads, profile_memory
from app.engine.model_info import complete_config
from app.engine.weights import open_model
from models import llama
from models.kv import STEP
from tests import tiny
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.switched import BOTH, computing

GIB = 1 << 30
NAMES = {mx.uint32: "U32", mx.bfloat16: "BF16", mx.float32: "F32"}


def files_of(folder: Path) -> ModelFiles:
    return complete_config(store.resolve(str(folder)))


@pytest.fixture
def files(tiny_model: Path) -> ModelFiles:
    return files_of(tiny_model)


def tight(files: ModelFiles, spare: int, **asked: Any) -> Settings:
    """Settings whose budget has `spare` bytes for layer caches of a context of 1024."""
    plain = estimate_fit(files, Settings(context=1024, **asked))
    return Settings(memory=plain.weights + plain.working + spare, **asked)


def sequence(files: ModelFiles, length: int) -> int:
    return estimate_fit(files, Settings(context=length)).kv_per_context


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_every_architecture_tells_its_layer_caches_unevaluated(case: Case, tmp_path: Path) -> None:
    """The same numbers as those of a model that has run, and nothing in memory for them."""
    parity.saved(case, tmp_path)
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


def test_reduced_weights_are_counted_as_what_they_will_be(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", hidden_size=64, intermediate_size=128)
    whole, four = (estimate_fit(files_of(folder), Settings(quantize=bits)) for bits in (None, 4))
    # 4 bits, a scale and a bias in 32 bits for each 64: 5 bits of 32
    assert four.weights == pytest.approx(whole.weights * 5 / 32, rel=0.05)


def test_the_working_space_is_foretold_within_reason(tmp_path: Path) -> None:
    """Neither so little that the engine finds no room after all, nor so much that what fits is
    refused. The logits and scores, which are known, are left out."""
    folder = tiny.write(tmp_path / "m", hidden_size=256, intermediate_size=768)
    files, settings = files_of(folder), Settings(context=STEP, parallel=1, prefill_chunk=512)
    model: Any = open_model(files, None)
    mx.eval(model.parameters())
    found = estimate_before_load(model, files, settings)
    heads = num_query_heads(files.config)
    # how far the work lags behind those who ask for it differs, and with it what is held at once
    working = max(
        profile_memory(
            model, budget=0, weights=0, chunk=512, max_batch_size=1, heads=heads, context=STEP
        ).working
        for _ in range(5)
    )
    scores = ActivationMemory(
        bytes_per_token=0, chunk=512, max_batch_size=0, vocab=0, heads=heads, layers=_caches(model)
    )(STEP)
    assert 0.5 < (working - scores) / (found.working - scores) < 2


def _caches(model: Any) -> Any:
    layers = model.make_kv()
    mx.eval(model(mx.array([[0]]), layers))
    return layers


def test_a_class_that_gives_only_logits_needs_one_row_of_them(tmp_path: Path) -> None:
    """Eight rows as wide as a vocabulary of 256,000 would refuse what fits."""
    [case] = [case for case in cases() if case.id.startswith("starcoder2")]
    config = {**case.config, "vocab_size": 50_000}
    parity.saved(replace(case, config=config), tmp_path)
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    found = estimate_fit(files_of(tmp_path), Settings(context=STEP, parallel=1, prefill_chunk=64))
    assert 64 * 50_000 * 4 < found.working < 2 * 64 * 50_000 * 4


def test_a_class_that_cannot_run_is_refused_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [case] = [case for case in cases() if case.id.startswith("starcoder2")]
    parity.saved(case, tmp_path)
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    more = [cache.KVCache() for _ in range(3)]
    monkeypatch.setattr(starcoder2.Model, "make_cache", lambda _: more, raising=False)
    with pytest.raises(AppError, match="does not advance by one entry per position") as caught:
        estimate_fit(files_of(tmp_path), Settings())
    assert str(tmp_path) in caught.value.message


def test_a_class_that_trips_over_its_config_is_refused_in_one_line(tmp_path: Path) -> None:
    [case] = [case for case in cases() if case.id.startswith("starcoder2")]
    parity.saved(case, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**case.config, "rope_theta": "many"}))
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(AppError, match=r"starcoder2 cannot be run .* TypeError: rope") as caught:
        estimate_fit(files_of(tmp_path), Settings())
    assert "\n" not in caught.value.message


def test_the_longest_context_that_fits_is_told(files: ModelFiles) -> None:
    for steps in (1, 2, 3):
        found = estimate_fit(files, tight(files, sequence(files, steps * STEP)))
        assert found.context_that_fits >= steps * STEP
        assert found.context_that_fits < files.context_length
        assert found.fits, "no context was asked for: a shorter one will do"
        used = Settings(memory=found.budget, context=found.context_that_fits)
        assert estimate_fit(files, used).fits
        more = Settings(memory=found.budget, context=found.context_that_fits + STEP)
        assert not estimate_fit(files, more).fits


def test_each_of_the_sequences_that_were_asked_for_has_the_context(files: ModelFiles) -> None:
    room = 4 * sequence(files, 1024)
    for parallel, fits in ((4, True), (5, False)):
        asked = tight(files, room, parallel=parallel)
        found = estimate_fit(files, Settings(memory=asked.memory, parallel=parallel, context=1024))
        assert (found.sequences, found.fits) == (parallel, fits)


def test_what_does_not_fit_is_refused_with_both_numbers_and_what_would(files: ModelFiles) -> None:
    budget = tight(files, 2 * sequence(files, 1024)).memory
    found = estimate_fit(files, Settings(memory=budget, parallel=4, context=1024))
    with pytest.raises(AppError) as caught:
        raise_unless_fits(found, files)
    message = caught.value.message
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert (
        f"KV cache for 4 sequences of 1024 tokens {format_memory(4 * found.kv_per_context)}"
        in message
    )
    assert f"{format_memory(found.needed)} in total" in message
    assert f"the budget is {format_memory(found.budget)}" in message
    assert f"the largest --context that fits is {found.context_that_fits}" in message
    assert found.needed > found.budget
    assert "set --parallel below 4" in message


def test_a_model_beside_which_nothing_fits_is_refused_whatever_was_asked(
    files: ModelFiles,
) -> None:
    found = estimate_fit(files, Settings(memory=1000))
    assert (found.context_that_fits, found.fits) == (0, False)
    with pytest.raises(AppError, match=r"no context length fits: raise --memory"):
        raise_unless_fits(found, files)


def test_the_budget_is_the_devices_unless_somebody_says_otherwise(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "device_budget", lambda: 12345)
    assert estimate_fit(files, Settings()).budget == 12345
    assert estimate_fit(files, Settings(memory=10**9)).budget == 10**9


def test_a_folder_of_40_gb_is_judged_from_its_headers(tmp_path: Path) -> None:
    """Llama 3.3 70B in 4 bits: the headers are real, and behind them is nothing."""
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
    folder = hollow(tmp_path / "huge", config)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size > 38e9
    settings = Settings(memory=64 * GIB, context=8192, parallel=1)
    mx.reset_peak_memory()
    active, read = mx.get_active_memory(), bytes_read()
    found = estimate_fit(files_of(folder), settings)
    assert bytes_read() - read < 16 << 20
    assert mx.get_peak_memory() - active < 16 << 20
    assert found.weights == pytest.approx(size, rel=1e-4)
    # keys and values in float32, in which a CPU computes
    assert found.kv_per_context == 2 * 80 * 8 * 128 * 8192 * 4
    assert found.fits
    # the same with a machine of 40 GiB
    assert not estimate_fit(files_of(folder), Settings(memory=40 * GIB, context=32768)).fits


def bytes_read() -> int:
    """What this process has read since it started; 0 where the system does not count it."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    return int(counters.read_text().split("rchar: ")[1].split()[0])


def hollow(folder: Path, config: dict[str, Any]) -> Path:
    """A folder of 4-bit weights, whose files are as long as they say and hold nothing."""
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
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_what_a_cpu_makes_of_a_type_is_counted_to_the_byte(
    tmp_path: Path, dtype: mx.Dtype, by_kernels: bool
) -> None:
    """Our kernels multiply with halves as they are; MLX's own are so slow with them on a CPU that
    all becomes float32. Keys and values are that always."""
    folder = tiny.write(tmp_path / "m")
    halves = {name: array.astype(dtype) for name, array in tiny.weights().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), halves)
    files = files_of(folder)
    with computing(by_kernels=by_kernels):
        found = estimate_fit(files, Settings(context=300))
        model: Any = open_model(files, None)
        mx.eval(model.parameters())
        kv = model.make_kv()
        mx.eval(model(mx.zeros((1, 300), mx.int32), kv))
    matrix = dtype.size if by_kernels else 4
    stored = sum(array.size * (4 if array.ndim == 1 else matrix) for array in halves.values())
    assert found.weights == stored == sum(array.nbytes for _, array in _flat(model))
    assert found.kv_per_context == sum(layer.nbytes for layer in kv)
    assert {array.dtype for layer in kv for array in layer.state()} == {mx.float32}


def test_a_footprint_needs_no_values(files: ModelFiles) -> None:
    model = open_model(files, None)
    kv = model.make_kv()
    model(mx.array([[0]]), kv)
    # two layers of keys and values, two heads of four float32, in steps of 256 positions
    assert KVFootprint(kv, chunk=8)(300) == 2 * 2 * 2 * 4 * 4 * 512


class TestWhatAModelNeedsAmongOthers:
    def test_at_least_one_usual_sequence_at_best_several(self, files: ModelFiles) -> None:
        plain, found = estimate_fit(files, Settings()), estimate_memory(files, Settings())
        base = plain.weights + plain.working
        assert files.context_length == TYPICAL_SEQUENCE_LENGTH  # so that one number tells both
        assert found.min_bytes == base + plain.kv_per_context
        assert (
            found.preferred_bytes == base + 2 * fitting.DEFAULT_MAX_PARALLEL * plain.kv_per_context
        )
        assert found.device_budget > GIB / 4

    def test_what_was_asked_for_is_the_least(self, files: ModelFiles) -> None:
        asked = Settings(context=512, parallel=3)
        found = estimate_memory(files, asked)
        assert found.min_bytes == estimate_fit(files, asked).needed
        assert (
            found.preferred_bytes == found.min_bytes + 3 * estimate_fit(files, asked).kv_per_context
        )

    def test_memory_that_was_given_is_taken_at_its_word(self, files: ModelFiles) -> None:
        found = estimate_memory(files, Settings(memory=12345))
        assert (found.min_bytes, found.preferred_bytes) == (12345, 12345)

    def test_what_it_needs_is_enough_to_be_loaded(self, files: ModelFiles) -> None:
        for settings in (Settings(), Settings(parallel=2), Settings(context=700, parallel=2)):
            least = estimate_memory(files, settings).min_bytes
            given = estimate_fit(files, replace(settings, memory=least))
            assert given.fits
