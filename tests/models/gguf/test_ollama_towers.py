"""The vision tower in a file of Ollama's own converter is the same as in a projector file of
llama.cpp, and has the same bits as the same tower in the layout of the hub."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import pytest

from models.cpu_layout import apply_cpu_layout
from models.gguf import reader
from models.gguf.ollama_towers import has_tower, read_projector
from models.gguf.projectors import fits, read_config
from models.gguf.reader import GGUFError
from models.vision.tower import VisionTower
from tests.models.gguf.ollama_converter import Types, Weights, write_tower
from tests.models.gguf.projector_converter import to_numpy
from tests.models.gguf.test_projectors import (
    assert_same_rows,
    build,
    build_unread,
    remove,
    replace,
    text_config,
    write,
)
from tests.models.vision.test_towers import REFERENCE, draw_weights

# with the activation and the settings that Ollama's engine has
TOWERS = (
    "gemma3",
    "gemma4",
    "gemma4-clipped",
    "mistral3-silu",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_vl",
)


def write_whole(folder: Path, name: str, **options: Any) -> Path:
    weights = to_numpy(draw_weights(name))
    return write_tower(folder / "model.gguf", REFERENCE[name]["config"], weights, **options)


def open_tower(path: Path, name: str) -> VisionTower:
    file = read_projector(path)
    assert fits(file, text_config(name))
    tower, unread = build_unread(file, name)
    apply_cpu_layout(tower)
    unread.read()
    return tower


@pytest.mark.parametrize("name", TOWERS)
def test_the_rows_are_those_of_a_folder(tmp_path: Path, name: str):
    found = open_tower(write_whole(tmp_path, name), name)
    assert_same_rows(found, build(name, draw_weights(name)), name)


@pytest.mark.parametrize("name", TOWERS)
def test_matrices_in_float16_give_the_rows_of_a_folder_with_such_matrices(
    tmp_path: Path, name: str
):
    found = open_tower(write_whole(tmp_path, name, quantize=to_float16), name)
    rounded = {
        key: array.astype(mx.float16) if array.ndim > 1 else array
        for key, array in draw_weights(name).items()
    }
    assert_same_rows(found, build(name, rounded), name)


@pytest.mark.parametrize("name", TOWERS)
def test_the_config_is_that_of_a_projector_file(tmp_path: Path, name: str):
    text = text_config(name)
    expected = read_config(reader.read(write(tmp_path, name)), text)
    assert read_config(read_projector(write_whole(tmp_path, name)), text) == expected


def test_the_settings_for_images_are_those_of_the_file(tmp_path: Path):
    settings = {
        "min_pixels": 4096,
        "max_pixels": 65536,
        "image_mean": [0.25, 0.5, 0.75],
        "image_std": [0.5, 0.25, 0.125],
    }
    file = read_projector(write_whole(tmp_path, "qwen3_vl", processor=settings))
    _, processor = read_config(file, text_config("qwen3_vl"))
    assert processor == settings


def test_a_file_without_a_tower_has_none(tmp_path: Path):
    projector = write(tmp_path, "gemma3")
    assert not has_tower(reader.read(projector))
    assert read_projector(projector) == reader.read(projector)


def test_quantized_parts_of_different_types_are_joined(tmp_path: Path):
    """Ollama quantizes the values of an attention, but not its queries and keys."""

    def choose(name: str) -> Types | None:
        return Types.F16 if re.search("attn_[qk]", name) else None

    path = write_whole(tmp_path, "qwen3_vl", quantize=choose)
    rounded = draw_weights("qwen3_vl")
    for key, array in rounded.items():
        if key.endswith("qkv.weight"):
            rows = array.shape[0] // 3 * 2
            halves = array[:rows].astype(mx.float16).astype(mx.float32)
            rounded[key] = mx.concatenate([halves, array[rows:]])
    found = open_tower(path, "qwen3_vl")
    assert_same_rows(found, build("qwen3_vl", rounded), "qwen3_vl")


def to_float16(name: str) -> Types:
    return Types.F16


def rename(old: str, new: str) -> Callable[[Weights], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma3", rename("v.post_layernorm.bias", "v.x.bias"), r"have no tensor v\.x\.bias"),
        ("qwen2_5_vl", remove("v.blk.0.ffn_up.weight"), "lacks the matrix v.blk.0.ffn_up.weight"),
        ("qwen3_vl", remove("v.blk.0.mlp.linear_fc1.weight"), "lacks the matrix v.blk.0.mlp"),
        (
            "qwen3_vl",
            rename("v.deepstack_merger.1.norm.bias", "v.deepstack_merger.2.norm.bias"),
            "does not have the level of the tensor v.deepstack_merger.2.norm.bias",
        ),
        ("gemma4-clipped", remove("v.blk.0.attn_q.input_max"), "value limits in v.clamp_data"),
        (
            "qwen3_vl",
            replace("v.patch_embed.weight", (145, 2, 16, 16)),
            r"has the shape \[145, 2, 16, 16\]",
        ),
    ],
)
def test_wrong_tensors_are_rejected(
    tmp_path: Path, name: str, change: Callable[[Weights], None], message: str
):
    path = write_whole(tmp_path, name, change=change)
    with pytest.raises(Exception, match=message) as caught:
        open_tower(path, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma3", "gemma3.mm.tokens_per_image", 5, "8 patches do not become 5 rows"),
        ("gemma3", "gemma3.vision.patch_size", 0, "0 patches do not become 4 rows"),
        ("gemma3", "gemma3.vision.image_size", "big", "must be an integer"),
        ("qwen2_5_vl", "qwen25vl.vision.fullatt_block_indexes", [0, 2], "fullatt_block_indexes"),
        ("qwen2_5_vl", "qwen25vl.embedding_length", "wide", "must be an integer"),
        ("qwen3_vl", "qwen3vl.vision.deepstack_visual_indexes", [-1, 2], "2 integers"),
    ],
)
def test_wrong_values_are_rejected(tmp_path: Path, name: str, key: str, value: Any, message: str):
    def change_key(writer: gguf.GGUFWriter) -> None:
        [entries] = writer.kv_data
        kinds = gguf.GGUFValueType
        if isinstance(value, list):
            entries[key] = gguf.gguf_writer.GGUFValue(value, kinds.ARRAY, kinds.INT32)
        else:
            kind = kinds.STRING if isinstance(value, str) else kinds.UINT32
            entries[key] = gguf.gguf_writer.GGUFValue(value, kind)

    path = write_whole(tmp_path, name, extra=change_key)
    with pytest.raises(GGUFError, match=message):
        read_projector(path)
