"""Shards are loaded one weight at a time; errors are one line, and their memory is freed."""

import gc
import json
import resource
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.engine.weights import list_parameters, open_model, read_weights
from benchmarks import loading
from models import kernels
from models.base import Model
from models.cpu_layout import get_activation_bits
from tests import tiny
from tests.fakes import make_rust_panic
from tests.models.test_llama import logits

IDS = [1, 5, 9, 33]


def ignore_progress(percent: int, memory: int) -> None:
    assert 0 <= percent <= 100
    assert memory >= 0


def write_shards(tmp_path: Path, *parts: dict[str, mx.array], **changes: Any) -> ModelFiles:
    """A model folder whose shards hold these tensors."""
    folder = tiny.write(tmp_path / "model", **changes)
    (folder / "model.safetensors").unlink()
    for i, part in enumerate(parts):
        mx.save_safetensors(str(folder / f"model-{i}.safetensors"), part)
    return store.resolve(str(folder))


def halves(weights: dict[str, mx.array]) -> list[dict[str, mx.array]]:
    names = sorted(weights)
    return [{name: weights[name] for name in names[i::2]} for i in range(2)]


def answers(model: Model) -> np.ndarray:
    return logits(model, IDS)


def load_error(files: ModelFiles) -> str:
    with pytest.raises(AppError) as caught:
        open_model(files, None)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_panic_of_the_safetensors_library_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> Any:
        raise make_rust_panic()

    files = write_shards(tmp_path, tiny.weights())
    monkeypatch.setattr("app.engine.weights.safe_open", panic)
    assert "model-0.safetensors is not a complete safetensors file: " in load_error(files)


def test_weights_are_not_read_before_read_weights(tmp_path: Path) -> None:
    files = write_shards(tmp_path, *halves(tiny.weights()))
    gc.collect()
    before = mx.get_active_memory()
    model = open_model(files, None)
    # a rotation's few frequencies are computed at once
    assert mx.get_active_memory() - before < 4096
    read_weights(model, files.path, ignore_progress)
    allocated = mx.get_active_memory() - before
    assert sum(array.nbytes for array in list_parameters(model)) <= allocated


def test_a_file_that_is_truncated_during_the_read_is_an_error(
    tmp_path: Path,
) -> None:
    files = write_shards(tmp_path, tiny.weights())
    model = open_model(files, None)
    with files.shards[0].open("r+b") as file:
        file.truncate(files.shards[0].stat().st_size // 2)
    with pytest.raises(AppError, match=r"model: reading the weights failed: .*read from file"):
        read_weights(model, files.path, ignore_progress)


def test_blobs_without_an_extension_are_read_too(tmp_path: Path) -> None:
    files = write_shards(tmp_path, *halves(tiny.weights()))
    blobs = [shard.rename(shard.with_name(f"sha256-{i}")) for i, shard in enumerate(files.shards)]
    model = open_model(replace(files, shards=tuple(blobs)), None)
    single = open_model(store.resolve(str(tiny.write(tmp_path / "whole"))), None)
    assert np.array_equal(answers(model), answers(single))


def test_a_shard_that_is_listed_twice_is_opened_once(tmp_path: Path) -> None:
    files = write_shards(tmp_path, *halves(tiny.weights()))
    open_model(replace(files, shards=(*files.shards, *files.shards)), None)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """The store may detect this first; the engine does not rely on it."""
    files = write_shards(tmp_path, tiny.weights())
    other = tmp_path / "other.safetensors"
    mx.save_safetensors(str(other), {"model.norm.weight": mx.ones((16,))})
    message = load_error(replace(files, shards=(*files.shards, other)))
    assert f"the tensor model.norm.weight is in both {other} and {files.shards[0]}: " in message


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("dtype", [mx.int8, mx.int64, mx.uint32, mx.bool_])
def test_a_tensor_of_a_wrong_type_is_reported_with_its_file(
    tmp_path: Path, dtype: mx.Dtype, prefix: str
) -> None:
    weights = {f"{prefix}{name}": array for name, array in tiny.weights().items()}
    one, other = halves(weights)
    name = f"{prefix}model.norm.weight"
    wrong = one if name in one else other
    wrong[name] = mx.zeros((16,), dtype)
    dtype_name = str(dtype).removeprefix("mlx.core.").rstrip("_")
    message = load_error(write_shards(tmp_path, one, other))
    assert f"model-{0 if wrong is one else 1}.safetensors: " in message
    assert (
        f"wrongly typed tensors: model.norm.weight ({dtype_name}, expected floating point)"
        in message
    )


def test_errors_in_several_files_are_reported_for_the_folder(tmp_path: Path) -> None:
    parts = halves(tiny.weights())
    for part in parts:
        part.update({name: mx.zeros(a.shape, mx.int8) for name, a in part.items()})
    assert load_error(write_shards(tmp_path, *parts)).startswith(f"{tmp_path / 'model'}: ")


@pytest.mark.parametrize("dtype", ["F64", "F8_E5M2"])
def test_an_unsupported_dtype_is_reported_with_its_tensor(tmp_path: Path, dtype: str) -> None:
    files = write_shards(tmp_path, tiny.weights())
    size = {"F64": 8, "F8_E5M2": 1}[dtype]
    header = json.dumps({"odd": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}})
    shard = files.shards[0]
    shard.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(2 * size))
    assert load_error(files) == f"{shard}: the tensor odd is {dtype}, which MLX does not support"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_keeps_no_original_weights(tmp_path: Path, bits: Any) -> None:
    config = {**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 128}
    files = write_shards(tmp_path, tiny.weights(config), **config)
    gc.collect()
    before = mx.get_active_memory()
    model = open_model(files, bits)
    read_weights(model, files.path, ignore_progress)
    gc.collect()
    expected = sum(array.nbytes for array in list_parameters(model))
    # the allocator rounds some arrays up to whole pages, and panels begin at a cache line
    assert expected <= mx.get_active_memory() - before <= expected + 65536
    assert expected < sum(array.nbytes for array in tiny.weights(config).values()) / 2


def write_wide(tmp_path: Path) -> ModelFiles:
    config = {**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 128}
    return write_shards(tmp_path, tiny.weights(config), **config)


needs_kernels = pytest.mark.skipif(
    kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}"
)


@needs_kernels
def test_fewer_bits_of_activations_change_the_logits_of_a_quantized_model(tmp_path: Path) -> None:
    files = write_wide(tmp_path)
    models = {bits: open_model(files, 8, activations=bits) for bits in (24, 16, 8)}
    found = {bits: answers(model) for bits, model in models.items()}
    assert {bits: get_activation_bits(model) for bits, model in models.items()} == {
        24: 24,
        16: 16,
        8: 8,
    }
    # the model is in float32
    assert (answers(open_model(files, 8)) == found[24]).all()
    errors = [float(np.abs(found[bits] - found[24]).max()) for bits in (16, 8)]
    assert 0 < errors[0] < errors[1] / 20 < 1


@needs_kernels
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_checkpoint_in_16_bits_has_16_bit_activations(tmp_path: Path, dtype: mx.Dtype) -> None:
    config = {**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 128}
    weights = {name: array.astype(dtype) for name, array in tiny.weights(config).items()}
    files = write_shards(tmp_path, weights, **config)
    model, explicit = open_model(files, 4), open_model(files, 4, activations=16)
    assert get_activation_bits(model) == 16
    assert (answers(model) == answers(explicit)).all()
    assert get_activation_bits(open_model(files, 4, activations=24)) == 24
    # bfloat16 weights have parts of the input on tiles
    on_tiles = dtype == mx.bfloat16 and kernels.describe().why_no_bf16_tiles is None
    plain = open_model(files, None)
    assert get_activation_bits(plain) == (16 if on_tiles else None)
    if on_tiles:
        exact, least = (open_model(files, None, activations=bits) for bits in (24, 8))
        assert [get_activation_bits(model) for model in (exact, least)] == [24, 16]
        assert (answers(least) == answers(plain)).all()
        assert 0 < np.abs(answers(exact) - answers(plain)).max() < 1e-3


@needs_kernels
def test_activations_need_a_model_with_quantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_wide(tmp_path)
    assert get_activation_bits(open_model(files, None)) is None
    with pytest.raises(AppError) as caught:
        open_model(files, None, activations=8)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert caught.value.message == (
        f"{files.path}: 8-bit activations need weights of 4 or 8 bits that the CPU kernels "
        "multiply, but the model has none: leave out --activations, or set --quantize"
    )
    monkeypatch.setattr(kernels, "_module", None)
    with pytest.raises(AppError, match="but the CPU kernels are not in use"):
        open_model(files, 8, activations=16)
    assert get_activation_bits(open_model(files, 8, activations=24)) is None


SMALL = {
    **loading.SHAPE,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 2048,
    "vocab_size": 16000,
}


@pytest.mark.parametrize("bits", [None, 4])
def test_at_most_one_weight_is_held_twice(tmp_path: Path, bits: int | None) -> None:
    """In float32, which is repacked on a CPU, and quantized, in which case it is also held in its
    quantized form before it is repacked. `make bench ARGS=loading` measures it with 1 GB."""
    folder = loading.write(tmp_path / "model", mx.float32, SMALL)
    largest = (32 + (bits or 0)) * SMALL["vocab_size"] * SMALL["hidden_size"] // 8
    found = loading.measure(folder, bits)
    assert found["weights"] < sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert found["mlx"] <= found["weights"] + largest + (1 << 20)
    # memory that the allocator of the C library keeps
    assert found["process"] <= found["weights"] + largest + (64 << 20)


def test_the_open_file_limit_is_raised_for_many_shards(tmp_path: Path) -> None:
    """Ollama's store has a file for each tensor, and macOS lets a process open 256."""
    weights = {f"{i}": mx.ones((2,)) for i in range(40)}
    for name, array in weights.items():
        mx.save_safetensors(str(tmp_path / name), {name: array})
    code = (
        "import resource, sys; from pathlib import Path; from app.engine import weights\n"
        "weights._EXTRA_OPEN_FILES = 32\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, int(sys.argv[2])))\n"
        "found, _ = weights._open_shards(sorted(Path(sys.argv[1]).glob('*')))\n"
        "print(sum(array.sum().item() for array in found.values()))"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 40
    done = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), str(limit)], capture_output=True, text=True
        )
        for limit in (hard, 48)
    ]
    assert done[0].stdout == "80.0\n", done[0].stderr
    assert "the model has 40 files, so this process needs 72 open files, " in done[1].stderr
