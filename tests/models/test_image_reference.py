"""Text models with image rows give the same results as transformers, and a sequence with images has
the same bits in any chunks and batches.

The references are in image_reference.json, which image_reference.py writes.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures, kernels
from models.base import Model, select_all, select_last
from models.batch_cache import PackedKVCache
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from models.image_inputs import ImageInputs, to_model_ids
from models.kv import KVBuffers, LayerCache, get_position_delta, set_position_delta
from models.mrope import ImageRange, find_delta, make_positions
from models.slab_step import SlabRow, SlabStep
from models.slabs import create_slab
from tests.models import image_reference, parity
from tests.models.image_reference import (
    CASES,
    IMAGE,
    LAYOUTS,
    draw_features,
    draw_ids,
    draw_weight,
)
from tests.models.image_reference import list_images as list_tuples

pytestmark = pytest.mark.recorded

REFERENCE: Any = json.loads(image_reference.FILE.read_text())
MROPE = [name for name in CASES if name.startswith("qwen")]
TWO_WAY = ["gemma3", "gemma4-large"]
# the delta rule is computed in two ways
INVARIANT = [name for name in CASES if name != "qwen3_5"]
STEPS = 4


def build(name: str, *, layout: bool = True, bits: int | None = None) -> Model:
    case = REFERENCE[name]
    weights = {
        tensor: mx.array(draw_weight(tensor, shape)) for tensor, shape in case["tensors"].items()
    }
    model: Any = architectures.build(case["config"], weights, bits=bits)
    if layout:
        apply_cpu_layout(model)
    return model


def list_images(layout: str) -> list[ImageRange]:
    return [ImageRange(*image) for image in list_tuples(layout)]


def make_inputs(model: Model, name: str, layout: str, start: int, end: int) -> ImageInputs | None:
    """The image rows of a chunk, or None without any."""
    ids, images = draw_ids(layout), list_images(layout)
    rows = [i for i in range(start, end) if ids[i] == IMAGE]
    if not rows:
        return None
    assert model.image_rules is not None
    before = ids[:start].count(IMAGE)
    drawn = slice(before, before + len(rows))
    return ImageInputs(
        rows=mx.array([i - start for i in rows], dtype=mx.int32),
        features=mx.array(draw_features(layout, "rows")[drawn]),
        deepstack=[
            mx.array(draw_features(layout, f"layer {layer}")[drawn])
            for layer in range(CASES[name][2])
        ],
        positions=make_positions(images, start, end)
        if model.image_rules.positions == "mrope"
        else None,
        groups=[(image.start, image.end) for image in images],
    )


def read_ids(layout: str) -> list[int]:
    return to_model_ids([-1 if token == IMAGE else token for token in draw_ids(layout)])


def prefill(
    model: Model, name: str, layout: str, kv: list[LayerCache], ends: Sequence[int] = ()
) -> mx.array:
    """The logits [L, V] of a prompt, computed in chunks with these ends."""
    ids, found, start = read_ids(layout), list[mx.array](), 0
    for end in [*ends, len(ids)]:
        prepare(model, kv, layout, start)
        images = make_inputs(model, name, layout, start, end)
        hidden = model(mx.array([ids[start:end]]), kv, select_all, images)
        found.append(model.logits(hidden)[0])
        start = end
    prepare(model, kv, layout, len(ids))
    return mx.concatenate(found)


def difference(one: mx.array, other: mx.array) -> float:
    return float(np.abs(np.array(one) - np.array(other)).max())


def prepare(model: Model, kv: list[LayerCache], layout: str, index: int) -> None:
    """Sets the delta of a sequence before a pass, as the engine does."""
    assert model.image_rules is not None
    if model.image_rules.positions == "mrope":
        set_position_delta(kv, find_delta(list_images(layout), index))


def allowed_ends(model: Model, layout: str, count: int) -> list[list[int]]:
    """Several ways to divide a prompt into chunks."""
    length = len(draw_ids(layout))
    assert model.image_rules is not None
    inside = {i for image in list_images(layout) for i in range(image.start + 1, image.end)}
    cuts = [i for i in range(1, length) if not (model.image_rules.atomic and i in inside)]
    random = np.random.default_rng(count)
    some = [sorted(random.choice(cuts, min(3, len(cuts)), replace=False).tolist()) for _ in "ab"]
    return [cuts, *some]


@pytest.mark.parametrize("layout", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_transformers(name: str, layout: bool) -> None:
    model = build(name, layout=layout)
    for prompt, logits in REFERENCE[name]["logits"].items():
        found = np.array(prefill(model, name, prompt, model.make_kv()))
        limit = parity.TOLERANCE_OF_DELTAS if name == "qwen3_5" else parity.TOLERANCE
        assert np.abs(found - np.array(logits)).max() < limit, prompt


@pytest.mark.parametrize("name", MROPE)
def test_the_positions_are_those_of_transformers(name: str) -> None:
    for layout, positions in REFERENCE[name]["positions"].items():
        length = len(draw_ids(layout))
        assert make_positions(list_images(layout), 0, length).tolist() == positions


@pytest.mark.skipif(kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}")
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("name", INVARIANT)
def test_the_bits_do_not_depend_on_chunks(name: str, bits: int | None) -> None:
    model = build(name, bits=bits)
    assert is_batch_invariant(model)
    for layout in LAYOUTS:
        whole = prefill(model, name, layout, model.make_kv())
        for ends in allowed_ends(model, layout, len(layout)):
            parts = prefill(model, name, layout, model.make_kv(), ends)
            assert mx.array_equal(whole, parts), (layout, ends)


@pytest.mark.parametrize("name", CASES)
def test_chunks_give_the_same_logits_without_the_kernels(name: str) -> None:
    model = build(name, layout=False)
    for layout in LAYOUTS:
        whole = prefill(model, name, layout, model.make_kv())
        for ends in allowed_ends(model, layout, 0):
            parts = prefill(model, name, layout, model.make_kv(), ends)
            assert difference(whole, parts) < 5e-4, (layout, ends)


@pytest.mark.skipif(kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}")
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("name", INVARIANT)
def test_decoding_has_the_same_bits_alone_in_batches_and_in_slabs(
    name: str, bits: int | None
) -> None:
    model = build(name, bits=bits)
    layouts = list(LAYOUTS)
    steps = np.random.default_rng(3).integers(3, 33, (STEPS, len(layouts))).tolist()

    def prefilled() -> list[list[LayerCache]]:
        found = [model.make_kv() for _ in layouts]
        for layout, kv in zip(layouts, found, strict=True):
            prefill(model, name, layout, kv)
        return found

    alone = prefilled()
    expected = [
        mx.concatenate(
            [
                model.logits(model(mx.array([[token]]), kv)[:, -1])
                for token, kv in zip(step, alone, strict=True)
            ]
        )
        for step in steps
    ]
    batched = prefilled()
    for step, logits in zip(steps, expected, strict=True):
        positions = mx.array([kv[0].offset + get_position_delta(kv) for kv in batched])
        together = [rows[0].make_batch(rows, positions) for rows in zip(*batched, strict=True)]
        found = model.logits(model(mx.array(step)[:, None], together)[:, -1])
        assert mx.array_equal(found, logits)
    in_slab = prefilled()
    slabs = [create_slab(cache) for cache in in_slab[0]]
    for number, kv in enumerate(in_slab):
        for slab, cache in zip(slabs, kv, strict=True):
            if number == 0:
                slab.grow(len(layouts), 256)
            slab.join(number, cache, clear_to=0)
    for count, (step, logits) in enumerate(zip(steps, expected, strict=True)):
        slab_rows = [
            SlabRow(
                key=number,
                slot=number,
                offset=kv[0].offset + count,
                position_delta=get_position_delta(kv),
            )
            for number, kv in enumerate(in_slab)
        ]
        step_rows = SlabStep(slab_rows)
        together = [
            slab.make_batch(step_rows, rows)
            for slab, rows in zip(slabs, zip(*in_slab, strict=True), strict=True)
        ]
        found = model.logits(model(mx.array(step)[:, None], together)[:, -1])
        # a slab uses MLX's attention
        assert difference(found, logits) < 1e-3


@pytest.mark.skipif(kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}")
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4-small"])
def test_text_after_images_has_the_same_bits_in_a_packed_prompt(name: str) -> None:
    model = build(name)
    more = {"five": [5, 6, 7], "first": [8, 9]}

    def prefilled() -> list[list[LayerCache]]:
        found = [model.make_kv() for _ in more]
        for layout, kv in zip(more, found, strict=True):
            prefill(model, name, layout, kv)
        return found

    alone = [
        model(mx.array([tokens]), kv)[0]
        for tokens, kv in zip(more.values(), prefilled(), strict=True)
    ]
    packed = prefilled()
    positions = [
        kv[0].offset + get_position_delta(kv) + i
        for kv, tokens in zip(packed, more.values(), strict=True)
        for i in range(len(tokens))
    ]
    layers: Any = list(zip(*packed, strict=True))
    lengths = [len(tokens) for tokens in more.values()]
    together = [PackedKVCache(layer, lengths, mx.array(positions)) for layer in layers]
    tokens = [token for part in more.values() for token in part]
    found = model(mx.array(tokens)[:, None], together)[:, 0]
    assert mx.array_equal(found, mx.concatenate(alone))


@pytest.mark.parametrize("name", CASES)
def test_a_selection_of_positions_has_the_same_hidden_states(name: str) -> None:
    model = build(name)
    exact = is_batch_invariant(model)
    for layout in LAYOUTS:
        ids = mx.array([read_ids(layout)])
        images = make_inputs(model, name, layout, 0, ids.shape[1])
        whole = model(ids, model.make_kv(), select_all, images)
        last = model(ids, model.make_kv(), select_last, images)
        assert difference(last, whole[:, -1:]) <= (0 if exact else 1e-4)


@pytest.mark.parametrize("layout", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("name", TWO_WAY)
def test_two_way_attention_changes_the_logits_of_image_rows(name: str, layout: bool) -> None:
    model = build(name, layout=layout)
    assert model.image_rules is not None
    assert model.image_rules.atomic
    ids = mx.array([read_ids("five")])
    images = make_inputs(model, name, "five", 0, ids.shape[1])
    assert images is not None
    both = model.logits(model(ids, model.make_kv(), select_all, images))[0]
    causal = replace(images, groups=())
    one = model.logits(model(ids, model.make_kv(), select_all, causal))[0]
    first = list_images("five")[0]
    assert mx.array_equal(both[: first.start], one[: first.start])
    assert difference(both[first.start], one[first.start]) > 0.1


@pytest.mark.parametrize("name", TWO_WAY)
def test_a_chunk_must_not_end_within_an_image_of_a_two_way_model(name: str) -> None:
    model = build(name)
    image = list_images("five")[0]
    with pytest.raises(ValueError, match="in one chunk"):
        prefill(model, name, "five", model.make_kv(), [image.start + 1])


@pytest.mark.parametrize("name", CASES)
def test_text_has_the_same_bits_with_equal_positions_on_all_axes(name: str) -> None:
    """A chunk of text after an image, with and without a row of its own positions."""
    model = build(name)
    if model.image_rules is None or model.image_rules.positions == "ordinary":
        pytest.skip("one axis")
    found: list[mx.array] = []
    for explicit in (False, True):
        kv = model.make_kv()
        prefill(model, name, "one", kv)
        end = kv[0].offset
        images = ImageInputs(
            rows=mx.zeros(0, mx.int32),
            features=mx.zeros((0, image_reference.HIDDEN)),
            positions=make_positions(list_images("one"), end, end + 3),
        )
        found.append(model(mx.array([[5, 6, 7]]), kv, select_all, images if explicit else None))
    assert mx.array_equal(found[0], found[1])


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_with_another_delta_is_not_shifted(name: str) -> None:
    model = build(name)
    assert model.image_rules is not None
    kv = model.make_kv()
    prefill(model, name, "five", kv)
    length = kv[0].offset
    if model.image_rules.positions != "ordinary":
        assert not model.shift(kv, 1, 2)
        assert kv[0].offset == length
    elif all(isinstance(cache, KVBuffers) and cache.sliceable for cache in kv):
        assert model.shift(kv, 0, 2)
