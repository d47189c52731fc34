"""Bad model folders: a one-line error that names the file, and no leaks.

The tests use the real code from the name of a model to its engine loop.
"""

import gc
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.model_info import complete_config
from app.runners.admission import Admission
from app.runners.thread_runner import ThreadRunner
from app.serving.generation import Generation
from tests import tiny
from tests.store.shards import tensor_entry, write

SETTINGS = Settings(parallel=1)


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of a model folder, for a test to damage."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture(autouse=True)
def check_leaks() -> Iterator[None]:
    """No memory and no open file is left behind. Leftovers of earlier tests may be freed."""
    gc.collect()
    memory, files = mx.get_active_memory(), len(os.listdir("/dev/fd"))
    yield
    gc.collect()
    assert mx.get_active_memory() <= memory
    assert len(os.listdir("/dev/fd")) <= files


def open_model(folder: Path) -> Loop:
    files = complete_config(store.resolve(str(folder)))
    Generation(files, Admission(ThreadRunner(SETTINGS), SETTINGS.max_queue), SETTINGS)
    return load(files, SETTINGS, lambda percent, memory: None)


def complaint(folder: Path) -> str:
    with pytest.raises(AppError) as caught:
        open_model(folder)
    assert str(folder) in caught.value.message
    check(caught.value)
    return caught.value.message


def check(error: AppError) -> None:
    assert error.kind is ErrorKind.MODEL_FILES
    assert error.message.isprintable()
    assert len(error.message) < 1000


def configure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, **changes}))


def index(folder: Path, **places: str) -> None:
    text = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


def truncate(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def set_wrong_header_length(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(struct.pack("<Q", 1 << 40) + shard.read_bytes()[8:])


def absurd_shape(folder: Path) -> None:
    shape = [1 << 30, 1 << 30, 1 << 30]
    write(folder / "model.safetensors", {"model.norm.weight": tensor_entry("F32", shape, 0, 4)}, 4)


def huge_shape(folder: Path) -> None:
    """Consistent, with a terabyte of data in a sparse file."""
    count = 1 << 38
    header = {"model.norm.weight": tensor_entry("F32", [1 << 19, 1 << 19], 0, 4 * count)}
    write(folder / "model.safetensors", header, 4 * count)


def wrong_dtype(folder: Path) -> None:
    weights = tiny.weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(mx.int32)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def foreign_dtype(folder: Path) -> None:
    write(
        folder / "model.safetensors", {"model.norm.weight": tensor_entry("F64", [16], 0, 128)}, 128
    )


def unknown_dtype(folder: Path) -> None:
    write(
        folder / "model.safetensors", {"model.norm.weight": tensor_entry("F7", [16], 0, 128)}, 128
    )


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    index(folder, x="model-00001-of-00002.safetensors")


def index_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    index(folder, x="../secret.safetensors")


def index_absolute(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    index(folder, x=str(folder.parent / "secret.safetensors"))


def symlink_loop(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


def symlink_loop_of_the_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("b")
    (folder / "b").symlink_to("config.json")


def dangling_link(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("../blobs/gone")


def a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def fewer_tensors_than_layers(folder: Path) -> None:
    configure(folder, num_hidden_layers=3)


def an_extra_layer(folder: Path) -> None:
    configure(folder, num_hidden_layers=1)


def a_billion_layers(folder: Path) -> None:
    configure(folder, num_hidden_layers=10**9)


def the_maximum_number_of_layers(folder: Path) -> None:
    configure(folder, num_hidden_layers=1024)


def other_widths(folder: Path) -> None:
    configure(folder, hidden_size=1 << 20, intermediate_size=1 << 24)


def another_vocabulary(folder: Path) -> None:
    configure(folder, vocab_size=1 << 24)


def heads_that_share_nothing(folder: Path) -> None:
    configure(folder, num_key_value_heads=3)


def broken_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{% if %}")


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "Novel"}}')


def broken_recommendation(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')


def broken_end(folder: Path) -> None:
    configure(folder, eos_token_id="</s>")


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BAD: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "model.safetensors is not a valid safetensors file: it is truncated"),
    (
        set_wrong_header_length,
        "model.safetensors is not a valid safetensors file: its header length is",
    ),
    (absurd_shape, "model.safetensors is not a valid safetensors file: the shape of"),
    (huge_shape, "the checkpoint lacks tensors"),
    (wrong_dtype, "model.norm.weight"),
    (foreign_dtype, "model.safetensors: the tensor model.norm.weight is F64"),
    (unknown_dtype, "has the unknown dtype 'F7'"),
    (
        missing_shard,
        "has no model-00001-of-00002.safetensors, which model.safetensors.index.json lists",
    ),
    (index_outside, "has no .safetensors file"),
    (index_absolute, "has no .safetensors file"),
    (symlink_loop, "model.safetensors is not a valid safetensors file: Too many levels"),
    (symlink_loop_of_the_config, "config.json cannot be read: Too many levels"),
    (dangling_link, "tokenizer.json cannot be read: it is a link to a missing file"),
    (a_pipe, "model.safetensors is not a valid safetensors file: it is not a regular file"),
    (fewer_tensors_than_layers, "lacks tensors: model.layers.2"),
    (an_extra_layer, "has unexpected tensors: model.layers.1"),
    (a_billion_layers, "num_hidden_layers is 1000000000"),
    (the_maximum_number_of_layers, "lacks tensors: model.layers.10."),
    (other_widths, "cannot be split into 4 attention heads"),
    (another_vocabulary, "has wrongly shaped tensors: lm_head.weight"),
    (heads_that_share_nothing, "num_key_value_heads is 3"),
    (broken_template, "the chat template in chat_template.jinja of"),
    (broken_tokenizer, "tokenizer.json is not a usable tokenizer"),
    (broken_recommendation, "generation_config.json of"),
    (broken_end, "eos_token_id in config.json"),
    (only_a_pickle, "a pickle file, which is never opened because it can run code"),
]


@pytest.mark.product
@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_bad_input_is_a_one_line_error_that_names_the_file(
    folder: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder)
    gc.collect()
    assert message in complaint(folder)


class Planted:
    """Unpickling it creates the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_no_code_of_a_folder_runs_and_no_pickle_is_opened(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).mkdir()\nclass Mine: pass\n"
    for name in (
        "modeling_mine",
        "configuration_mine",
        "tokenization_mine",
        "llama",
        "sitecustomize",
    ):
        (folder / f"{name}.py").write_text(code)
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Planted(marker)))
    maps = {"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    configure(folder, auto_map=maps, trust_remote_code=True)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config |= {"auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    open_model(folder)
    assert not marker.exists()
    configure(folder, auto_map=maps, model_type="mine")
    assert "mine" in complaint(folder)
    assert not marker.exists()
    pickle.loads((folder / "model.pt").read_bytes())
    assert marker.exists(), "the pickle would create the marker"


# every type of value, and boundary values
HOSTILE: list[Any] = [
    True, False, 0, -1, 1, 3, 10**6, 2**31 - 1, 2**31, 2**40, 2**63, 10**400, 0.5, -0.5, 1e308,
    "", "8", "llama", "../x", [], [1], ["a"], [[[]]], {}, {"a": 1}, {"rope_type": [1]},
    {"rope_type": "linear"}, {"type": "linear", "factor": 0}, {"rope_type": "yarn", "factor": "x"},
    {"rope_type": "llama3"}, {"rope_theta": -1.0}, {"rope_theta": "x"},
    {"bits": 3, "group_size": 7},
]  # fmt: skip

KEYS = [
    *tiny.CONFIG,
    *("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "layer_types"),
    *("quantization", "partial_rotary_factor", "sliding_window", "attention_bias", "text_config"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", KEYS)
def test_a_hostile_config_gives_a_loop_or_a_one_line_error(tiny_model: Path, key: str) -> None:
    files = store.resolve(str(tiny_model))
    for value in HOSTILE:
        hostile = replace(files, config={**files.config, key: value})
        if (error := refusal(hostile)) is not None:
            check(error)


def refusal(files: ModelFiles) -> AppError | None:
    try:
        load(complete_config(files), SETTINGS, lambda percent, memory: None)
    except AppError as error:
        return error
    return None
