"""A vision tower in a projector file gives the same bits as the same tower in the layout of the
hub."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from models.cpu_layout import apply_cpu_layout
from models.gguf import reader
from models.gguf.projector_weights import open_projector
from models.gguf.projectors import fits, group_tensors, read_config
from models.gguf.reader import GGUFError, GGUFFile, UnsupportedError
from models.gguf.weights import UnreadTensors
from models.multimodal import get_vision_weights
from models.vision.build import build_tower
from models.vision.tower import VisionTower
from tests.models.gguf.projector_converter import Weights, convert, to_numpy
from tests.models.gguf.raw_file import gguf as raw_gguf
from tests.models.gguf.raw_file import text_entry
from tests.models.vision.reference import CASES, CLIP
from tests.models.vision.test_towers import REFERENCE, arrays, draw_weights, same_bits, tiles

Types = gguf.GGMLQuantizationType

# the model type of the text model in GGUF, if it is not that on the hub
TEXT_TYPES: Mapping[str, str] = {
    "gemma4_unified": "gemma4_text",
    "mistral3": "llama",
    "pixtral": "llama",
    "qwen2_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5",
}
NORMALIZED_LIKE_CLIP = ("mistral3", "mistral3-silu", "pixtral", "qwen2_vl", "qwen2_5_vl")


def text_config(name: str) -> dict[str, Any]:
    """The config of the text model as `models.gguf.architectures.read_config` returns it."""
    text = REFERENCE[name]["config"]["text_config"]
    return {**text, "model_type": TEXT_TYPES.get(name, text["model_type"])}


def write(folder: Path, name: str, weights: Weights | None = None, **options: Any) -> Path:
    mean, std = ([0.0] * 3, [1.0] * 3) if name.startswith("gemma4") else ([0.5] * 3, [0.5] * 3)
    if name in NORMALIZED_LIKE_CLIP:
        mean, std = CLIP
    return convert(
        REFERENCE[name]["config"],
        to_numpy(draw_weights(name)) if weights is None else weights,
        folder / "mmproj.gguf",
        processor={"image_mean": mean, "image_std": std},
        **options,
    )


def open_tower(path: Path, name: str) -> VisionTower:
    file = reader.read(path)
    assert fits(file, text_config(name))
    tower, unread = build_unread(file, name)
    apply_cpu_layout(tower)
    unread.read()
    return tower


def build_unread(file: GGUFFile, name: str) -> tuple[VisionTower, UnreadTensors]:
    config, processor = read_config(file, text_config(name))
    unread = UnreadTensors()
    tower = architectures._build_tower(
        config, open_projector(file, unread), processor, unread.blocks
    )
    assert tower is not None
    return tower, unread


def build(name: str, weights: Mapping[str, mx.array]) -> VisionTower:
    built = build_tower(REFERENCE[name]["config"], get_vision_weights(weights))
    assert built is not None
    tower, named = built
    tower.load_weights(list(named.items()))
    apply_cpu_layout(tower)
    return tower


def assert_same_rows(found: VisionTower, expected: VisionTower, name: str) -> None:
    for sizes in CASES[name].images:
        assert same_bits(found.encode(tiles(sizes)), expected.encode(tiles(sizes)))


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_of_a_folder(tmp_path: Path, name: str):
    found = open_tower(write(tmp_path, name), name)
    assert_same_rows(found, build(name, draw_weights(name)), name)


@pytest.mark.parametrize("name", CASES)
def test_matrices_in_float16_give_the_rows_of_a_folder_with_such_matrices(
    tmp_path: Path, name: str
):
    found = open_tower(write(tmp_path, name, quantize=lambda name: Types.F16), name)
    rounded = {
        key: array.astype(mx.float16) if array.ndim > 1 else array
        for key, array in draw_weights(name).items()
    }
    assert_same_rows(found, build(name, rounded), name)


def quantized(name: str) -> Types | None:
    """The matrices of a tiny Qwen3-VL whose rows are multiples of 32."""
    is_wide = re.search(r"ffn_down|mm\.|deepstack.*fc", name) is not None
    return Types.Q8_0 if is_wide and name.endswith(".weight") else None


def test_quantized_matrices_keep_their_blocks(tmp_path: Path):
    name = "qwen3_vl"
    path = write(tmp_path, name, quantize=quantized)
    names = group_tensors(reader.read(path))
    rounded = to_numpy(draw_weights(name))
    for key, array in rounded.items():
        [source, *_] = names[key.removeprefix("model.")]
        if array.ndim > 1 and quantized(source):
            rounded[key] = gguf.dequantize(gguf.quantize(array, Types.Q8_0), Types.Q8_0)
    expected = build(name, {key: mx.array(array) for key, array in rounded.items()})
    found = open_tower(path, name)
    size = sum(array.nbytes for _, array in flatten(found))
    assert size < 0.7 * sum(array.nbytes for _, array in flatten(expected))
    for sizes in CASES[name].images:
        pairs = zip(
            arrays(found.encode(tiles(sizes))), arrays(expected.encode(tiles(sizes))), strict=True
        )
        for rows, theirs in pairs:
            np.testing.assert_allclose(rows, theirs, rtol=0, atol=2e-3)


def flatten(tower: VisionTower) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    found: Any = tree_flatten(tower.parameters())
    return found


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl", "smolvlm"])
def test_early_files_have_swapped_names_in_mlps(tmp_path: Path, name: str):
    def swap(tensors: Weights) -> None:
        renamed = {
            re.sub(
                "ffn_(up|down)", lambda m: {"up": "ffn_down", "down": "ffn_up"}[m[1]], key
            ): array
            for key, array in tensors.items()
        }
        tensors.clear()
        tensors.update(renamed)

    found = open_tower(write(tmp_path, name, change=swap), name)
    assert_same_rows(found, build(name, draw_weights(name)), name)


@pytest.mark.parametrize("name", CASES)
def test_the_config_is_that_of_the_hub(tmp_path: Path, name: str):
    config, processor = read_config(reader.read(write(tmp_path, name)), text_config(name))
    whole = REFERENCE[name]["config"]
    kinds = {"llava": "pixtral", "smolvlm": "idefics3"}
    assert config["model_type"] == kinds.get(whole["model_type"], whole["model_type"])
    derived = {"image_size", "model_type", "hidden_act", "rope_theta", "window_size"}
    for key, value in config["vision_config"].items():
        if key not in derived:
            assert whole["vision_config"].get(key, value) == value, key
    for key in ("mm_tokens_per_image", "scale_factor", "downsample_factor", "spatial_merge_size"):
        if key in whole:
            assert config[key] == whole[key]
    assert len(processor["image_mean"]) == len(processor["image_std"]) == 3


@pytest.mark.parametrize(
    ("per_layer", "expected"), [(0, "vision"), (8, None)], ids=["large", "small"]
)
def test_images_of_a_large_gemma_4_see_ahead(tmp_path: Path, per_layer: int, expected: str | None):
    text = {**text_config("gemma4"), "hidden_size_per_layer_input": per_layer}
    text.pop("use_bidirectional_attention", None)
    config, _ = read_config(reader.read(write(tmp_path, "gemma4")), text)
    assert config["text_config"].get("use_bidirectional_attention") == expected


@pytest.mark.parametrize(
    ("text", "does_fit"),
    [
        ({"model_type": "qwen3_vl_text", "hidden_size": 32}, True),
        ({"model_type": "qwen3_vl_text", "hidden_size": 64}, False),
        ({"model_type": "llama", "hidden_size": 32}, False),
    ],
)
def test_a_projector_fits_models_of_its_family_and_size(
    tmp_path: Path, text: dict[str, Any], does_fit: bool
):
    assert fits(reader.read(write(tmp_path, "qwen3_vl")), text) is does_fit


def complain(path: Path, name: str) -> str:
    with pytest.raises((GGUFError, ModelError)) as caught:
        open_tower(path, name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unsupported_type_is_rejected_by_name(tmp_path: Path):
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(raw_gguf([text_entry("general.architecture", "clip")]))
    with pytest.raises(UnsupportedError, match="has no vision tower"):
        fits(reader.read(path), text_config("gemma3"))
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("internvl")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"'internvl' are not supported; .*: gemma3, gemma4"):
        fits(reader.read(path), text_config("gemma3"))


def test_a_text_model_is_not_a_projector(tmp_path: Path):
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(raw_gguf([text_entry("general.architecture", "llama")]))
    with pytest.raises(GGUFError, match="is a llama and not a projector"):
        fits(reader.read(path), text_config("gemma3"))


def remove(name: str) -> Callable[[Weights], None]:
    def change(tensors: Weights) -> None:
        del tensors[name]

    return change


def replace(name: str, shape: tuple[int, ...]) -> Callable[[Weights], None]:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_vl", remove("v.blk.1.ffn_up.weight"), r"lacks tensors: blocks\.1\.mlp\.linear_fc1"),
        ("qwen3_vl", remove("v.patch_embd.weight.1"), "has 1 tensors v.patch_embd.weight, not 2"),
        ("qwen3_vl", remove("v.position_embd.weight"), "lacks the tensor v.position_embd.weight"),
        ("qwen3_vl", replace("v.extra.weight", (3, 3)), "have no tensor v.extra.weight"),
        ("qwen3_vl", replace("v.blk.9.ln1.weight", (48,)), "unexpected tensors: blocks.9.norm1"),
        ("qwen3_vl", replace("mm.0.weight", (7, 7)), r"wrongly shaped tensors: .*\[7, 7\]"),
        ("qwen3_vl", replace("v.position_embd.weight", (3,)), "has 1 dimensions instead of 2"),
        ("qwen2_5_vl", replace("v.blk.0.attn_q.weight", (48, 5)), "parts of visual.blocks.0"),
        ("qwen2_5_vl", replace("v.patch_embd.weight", (48, 3, 7, 7)), "parts of visual.patch_"),
        ("mistral3", replace("v.blk.0.attn_q.weight", (7, 48)), "cannot be divided among 4 heads"),
        ("lfm2_vl", replace("v.patch_embd.weight", (48, 5)), "not a shape of patches"),
        ("gemma4", replace("v.patch_embd.weight", (48, 5)), "not a shape of patches"),
        ("gemma4-clipped", replace("v.blk.0.attn_q.input_max", (2,)), "wrongly shaped"),
        ("gemma3", replace("v.patch_embd.weight", (48, 3, 7, 7)), "wrongly shaped tensors"),
    ],
)
def test_wrong_tensors_are_rejected(
    tmp_path: Path, name: str, change: Callable[[Weights], None], message: str
):
    assert re.search(message, complain(write(tmp_path, name, change=change), name))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("clip.vision.block_count", 0, "has 0 blocks"),
        ("clip.vision.block_count", 2**31, "has 2147483648 blocks"),
        ("clip.vision.block_count", -1, "must be an integer from 0"),
        ("clip.vision.patch_size", 0, "must be 1 or more"),
        ("clip.vision.attention.head_count", 0, "must be 1 or more"),
        ("clip.vision.attention.head_count", 5, "48 values cannot be divided among 5 heads"),
        ("clip.vision.embedding_length", 2**31, "hidden_size is 2147483648"),
        ("clip.vision.feed_forward_length", 7, "wrongly shaped tensors"),
        ("clip.vision.image_mean", [1.0], "must be 3 finite numbers"),
        ("clip.vision.image_std", [1.0, float("nan"), 1.0], "must be 3 finite numbers"),
        ("clip.vision.image_std", [1.0, 0.0, 1.0], "image_std contains 0"),
        ("clip.vision.image_mean", "red", "must be 3 finite numbers"),
    ],
)
def test_wrong_values_are_rejected(tmp_path: Path, key: str, value: Any, message: str):
    def change_key(writer: gguf.GGUFWriter) -> None:
        [entries] = writer.kv_data
        kinds = gguf.GGUFValueType
        if isinstance(value, list):
            entries[key] = gguf.gguf_writer.GGUFValue(value, kinds.ARRAY, kinds.FLOAT32)
        else:
            kind = kinds.STRING if isinstance(value, str) else kinds.INT64
            entries[key] = gguf.gguf_writer.GGUFValue(value, kind)

    found = complain(write(tmp_path, "qwen3_vl", extra=change_key), "qwen3_vl")
    assert re.search(message, found), found


def test_a_mutated_header_gives_a_tower_or_an_error_of_one_line(tmp_path: Path):
    path = write(tmp_path, "qwen3_vl")
    original = path.read_bytes()
    end = min(tensor.offset for tensor in reader.read(path).tensors.values())
    random = np.random.default_rng(0)
    errors: list[str] = []
    for _ in range(60):
        content = bytearray(original)
        content[random.integers(8, end)] = random.integers(256)
        path.write_bytes(content)
        try:
            file = reader.read(path)
            if fits(file, text_config("qwen3_vl")):
                build_unread(file, "qwen3_vl")
        except (GGUFError, ModelError) as error:
            errors.append(str(error))
    assert 10 < len(errors) < 60
    assert not any("\n" in error for error in errors)
