"""Shards become a model, a weight at a time, or one clear line; and nothing is left behind."""

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
from models.base import Model
from tests import tiny
from tests.bench import loading
from tests.fakes import make_rust_panic
from tests.models.test_llama import logits

IDS = [1, 5, 9, 33]


def silent(percent: int, memory: int) -> None:
    assert 0 <= percent <= 100
    assert memory >= 0


def folder_of(tmp_path: Path, *parts: dict[str, mx.array], **changes: Any) -> ModelFiles:
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


def refusal(files: ModelFiles) -> str:
    with pytest.raises(AppError) as caught:
        open_model(files, None)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_file_over_which_the_library_panics_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics(*_: object, **__: object) -> Any:
        raise make_rust_panic()

    files = folder_of(tmp_path, tiny.weights())
    monkeypatch.setattr("app.engine.weights.safe_open", panics)
    assert "model-0.safetensors is not a complete safetensors file: " in refusal(files)


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    files = folder_of(tmp_path, *halves(tiny.weights()))
    gc.collect()
    before = mx.get_active_memory()
    model = open_model(files, None)
    # a rotation's few frequencies are computed at once
    assert mx.get_active_memory() - before < 4096
    read_weights(model, files.path, silent)
    held = mx.get_active_memory() - before
    assert sum(array.nbytes for array in list_parameters(model)) <= held


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_like_any_other(
    tmp_path: Path,
) -> None:
    files = folder_of(tmp_path, tiny.weights())
    model = open_model(files, None)
    with files.shards[0].open("r+b") as file:
        file.truncate(files.shards[0].stat().st_size // 2)
    with pytest.raises(AppError, match=r"model: reading the weights failed: .*read from file"):
        read_weights(model, files.path, silent)


def test_blobs_without_an_extension_are_read_too(tmp_path: Path) -> None:
    files = folder_of(tmp_path, *halves(tiny.weights()))
    blobs = [shard.rename(shard.with_name(f"sha256-{i}")) for i, shard in enumerate(files.shards)]
    model = open_model(replace(files, shards=tuple(blobs)), None)
    whole = open_model(store.resolve(str(tiny.write(tmp_path / "whole"))), None)
    assert np.array_equal(answers(model), answers(whole))


def test_a_file_that_is_named_twice_is_opened_once(tmp_path: Path) -> None:
    files = folder_of(tmp_path, *halves(tiny.weights()))
    open_model(replace(files, shards=(*files.shards, *files.shards)), None)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """A store that looks may see it first; the engine does not rely on that."""
    files = folder_of(tmp_path, tiny.weights())
    other = tmp_path / "other.safetensors"
    mx.save_safetensors(str(other), {"model.norm.weight": mx.ones((16,))})
    message = refusal(replace(files, shards=(*files.shards, other)))
    assert f"the tensor model.norm.weight is in both {other} and {files.shards[0]}: " in message


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("dtype", [mx.int8, mx.int64, mx.uint32, mx.bool_])
def test_a_tensor_of_a_wrong_type_is_named_with_its_file(
    tmp_path: Path, dtype: mx.Dtype, prefix: str
) -> None:
    weights = {f"{prefix}{name}": array for name, array in tiny.weights().items()}
    one, other = halves(weights)
    name = f"{prefix}model.norm.weight"
    wrong = one if name in one else other
    wrong[name] = mx.zeros((16,), dtype)
    said = str(dtype).removeprefix("mlx.core.").rstrip("_")
    message = refusal(folder_of(tmp_path, one, other))
    assert f"model-{0 if wrong is one else 1}.safetensors: " in message
    assert f"wrongly typed tensors: model.norm.weight ({said}, expected floating point)" in message


def test_what_is_wrong_in_several_files_is_told_of_the_folder(tmp_path: Path) -> None:
    parts = halves(tiny.weights())
    for part in parts:
        part.update({name: mx.zeros(a.shape, mx.int8) for name, a in part.items()})
    assert refusal(folder_of(tmp_path, *parts)).startswith(f"{tmp_path / 'model'}: ")


@pytest.mark.parametrize("dtype", ["F64", "F8_E5M2"])
def test_a_type_that_mlx_does_not_have_is_named_with_its_tensor(tmp_path: Path, dtype: str) -> None:
    files = folder_of(tmp_path, tiny.weights())
    size = {"F64": 8, "F8_E5M2": 1}[dtype]
    header = json.dumps({"odd": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}})
    shard = files.shards[0]
    shard.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(2 * size))
    assert refusal(files) == f"{shard}: the tensor odd is {dtype}, which MLX does not support"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_reduced_model_holds_nothing_of_what_it_was(tmp_path: Path, bits: Any) -> None:
    config = {**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 128}
    files = folder_of(tmp_path, tiny.weights(config), **config)
    gc.collect()
    before = mx.get_active_memory()
    model = open_model(files, bits)
    read_weights(model, files.path, silent)
    gc.collect()
    wanted = sum(array.nbytes for array in list_parameters(model))
    # the allocator rounds up to whole pages here and there
    assert wanted <= mx.get_active_memory() - before <= wanted + 32768
    assert wanted < sum(array.nbytes for array in tiny.weights(config).values()) / 2


SMALL = {
    **loading.SHAPE,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 2048,
    "vocab_size": 16000,
}


@pytest.mark.parametrize("bits", [None, 4])
def test_no_more_than_one_weight_is_held_twice(tmp_path: Path, bits: int | None) -> None:
    """In float32, which is laid out anew on a CPU, and quantised. `make bench ARGS=loading` does it
    with 1 GB."""
    folder = loading.write(tmp_path / "model", mx.float32, SMALL)
    largest = 4 * SMALL["vocab_size"] * SMALL["hidden_size"]
    found = loading.measure(folder, bits)
    assert found["weights"] < sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert found["mlx"] <= found["weights"] + largest + (1 << 20)
    # pieces that the allocator of the C library keeps
    assert found["process"] <= found["weights"] + largest + (64 << 20)


def test_as_many_files_are_opened_as_there_are(tmp_path: Path) -> None:
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
