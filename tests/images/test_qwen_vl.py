"""The geometry of Qwen-VL, whose figures come from transformers' Qwen2VLImageProcessor."""

import pytest

from app.core.errors import AppError, ErrorKind
from tests.images.models import load
from tests.images.samples import make_image

QWEN_2 = {"min_pixels": 3136, "max_pixels": 1003520}


@pytest.mark.parametrize(
    ("model_type", "size", "tokens"),
    [
        ("qwen3_vl", (512, 512), 256),
        ("qwen3_vl", (640, 427), 260),
        ("qwen3_vl", (37, 23), 77),
        ("qwen2_5_vl", (512, 512), 324),
        ("qwen2_5_vl", (640, 427), 345),
        ("qwen2_5_vl", (37, 23), 6),
    ],
)
def test_the_number_of_tokens_follows_from_the_size(
    model_type: str, size: tuple[int, int], tokens: int
):
    plan = load(model_type).plan(make_image(*size))
    assert plan.num_tokens == tokens == plan.grid[0] * plan.grid[1]
    assert plan.text == plan.token * tokens


def test_halves_are_rounded_to_even():
    [tile] = load("qwen2_5_vl", QWEN_2).plan(make_image(28 * 5 // 2, 28 * 7 // 2)).tiles
    assert (tile.width, tile.height) == (56, 112)


def test_the_files_of_the_model_override_the_defaults():
    settings = {"patch_size": 16, "merge_size": 2, "size": {"longest_edge": 65536}}
    plan = load("qwen3_vl", settings).plan(make_image(1000, 1000))
    assert plan.num_tokens == 64


def test_a_large_image_is_scaled_down_to_the_limit_of_tokens():
    plan = load("qwen3_vl", max_tokens=100).plan(make_image(4000, 4000))
    assert plan.num_tokens == 100


@pytest.mark.parametrize("size", [(16384, 82), (82, 16384)])
def test_an_extremely_wide_or_high_image_has_no_more_tokens_than_the_limit(size: tuple[int, int]):
    assert load("qwen3_vl", max_tokens=64).plan(make_image(*size)).num_tokens <= 64


def test_low_detail_is_about_512_pixels_squared():
    plan = load("qwen3_vl").plan(make_image(2000, 2000, "low"))
    assert plan.num_tokens == 256


def test_a_shape_that_the_model_does_not_support_is_rejected():
    with pytest.raises(AppError, match=r"16384 × 80 pixels.*200 times") as caught:
        load("qwen3_vl").plan(make_image(16384, 80))
    assert caught.value.kind is ErrorKind.INVALID
