"""The plans of all families: the token limit, the detail, settings and model types."""

from collections.abc import Mapping
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.images import Image
from app.images.processor import load_image_processor
from tests.images.models import load, make_files
from tests.images.samples import make_image

SMOLVLM = {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_5": {},
    "gemma3": {},
    "gemma4": {},
    "mistral3": {},
    "pixtral": {},
    "smolvlm": SMOLVLM,
    "lfm2_vl": {},
}
SIZES = [(1, 1), (37, 23), (640, 427), (4000, 3000), (8000, 8000), (9999, 50), (50, 9999)]
VARIABLE = [name for name in CONFIGS if name != "gemma3"]


@pytest.mark.parametrize("model_type", VARIABLE)
@pytest.mark.parametrize("limit", [100, 512, 4096])
def test_no_image_has_more_tokens_than_the_limit(model_type: str, limit: int):
    processor = load(model_type, max_tokens=limit, **CONFIGS[model_type])
    for size in SIZES:
        assert 1 <= processor.plan(make_image(*size)).num_tokens <= limit, size


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_plan_is_consistent(model_type: str):
    processor = load(model_type, **CONFIGS[model_type])
    for size in SIZES:
        plan = processor.plan(make_image(*size))
        assert plan.grid[0] * plan.grid[1] == plan.num_tokens == plan.text.count(plan.token)
        assert all(tile.width > 0 and tile.height > 0 for tile in plan.tiles)
        assert processor.mark


@pytest.mark.parametrize("model_type", VARIABLE)
def test_low_detail_is_about_512_pixels_squared(model_type: str):
    processor = load(model_type, **CONFIGS[model_type])
    plan = processor.plan(make_image(4000, 3000, "low"))
    assert sum(tile.width * tile.height for tile in plan.tiles) <= 1.25 * 512**2
    assert plan.num_tokens < processor.plan(make_image(4000, 3000)).num_tokens


def test_the_break_tokens_of_pixtral_are_ordinary_tokens():
    plan = load("mistral3").plan(make_image(84, 56))
    assert plan.text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert (plan.grid, plan.num_tokens) == ((2, 3), 6)


def test_llava_with_the_tower_of_pixtral_has_its_plans():
    """Pixtral 12B, as it is published for transformers."""
    llava = load("llava", vision_config={"model_type": "pixtral", "patch_size": 16})
    for size in SIZES:
        image = make_image(*size)
        assert llava.plan(image) == load("pixtral").plan(image)
    clip = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    assert load_image_processor(make_files(clip)) is None


def test_the_tiles_of_smolvlm_are_row_by_row_with_the_whole_image_last():
    plan = load("smolvlm", **SMOLVLM).plan(make_image(1000, 500))
    assert plan.grid == (9, 64)
    assert [tile.crop for tile in plan.tiles[:2]] == [(0, 0, 512, 512), (512, 0, 1024, 512)]
    assert plan.tiles[-1].crop is None
    assert plan.text.count("<row_2_col_4>") == 1
    assert plan.text.count("\n") == 3


def test_the_thumbnail_of_lfm2_vl_is_last():
    plan = load("lfm2_vl").plan(make_image(1024, 1024))
    assert [(tile.width, tile.height) for tile in plan.tiles] == [(512, 512)] * 5
    assert plan.num_tokens == 5 * 256
    assert "<|img_row_2_col_2|>" in plan.text


def test_the_text_of_gemma_3_begins_and_ends_with_a_blank_line():
    text = load("gemma3").plan(make_image(9, 9)).text
    assert text.startswith("\n\n<start_of_image><image_soft_token>")
    assert text.endswith("<image_soft_token><end_of_image>\n\n")


def test_the_tokens_of_the_tokenizer_override_the_defaults():
    files = make_files({"model_type": "qwen3_vl"})
    object.__setattr__(files, "tokenizer_config", {"extra_special_tokens": {"image_token": "<i>"}})
    processor = load_image_processor(files)
    assert processor is not None
    assert processor.mark == processor.plan(make_image(9, 9)).token == "<i>"


def test_the_key_depends_on_the_file_and_on_the_geometry():
    small, large = load("qwen3_vl", max_tokens=64), load("qwen3_vl")
    one = make_image(2000, 2000)
    other = Image(data=b"", format="png", width=2000, height=2000, digest=b"\1" * 32)
    keys = {
        processor.plan(image).key(image) for processor in (small, large) for image in (one, other)
    }
    assert len(keys) == 4
    assert large.plan(one).key(one) == large.plan(one).key(one)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "qwen3_vl", "vision_config": None},
        {"model_type": "qwen3_vl", "vision_config": {}},
        {},
    ],
)
def test_a_model_without_vision_has_no_processor(config: Mapping[str, Any]):
    assert load_image_processor(make_files(config)) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"patch_size": 0},
        {"patch_size": True},
        {"patch_size": "16"},
        {"patch_size": 1 << 40},
        {"size": {"longest_edge": 1.5}},
        {"resample": 5},
    ],
)
def test_an_invalid_setting_of_a_model_names_the_key(settings: Mapping[str, Any]):
    with pytest.raises(AppError, match=r"patch_size|size\.longest_edge|resample") as caught:
        load("qwen3_vl", settings)
    assert caught.value.kind is ErrorKind.MODEL_FILES
