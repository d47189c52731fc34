"""Compare our logits with those of mlx-lm's class, on the same tiny checkpoint and ids.

The reference draws and saves the checkpoint, so names, shapes and layouts match published models.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache

from models import architectures
from models.base import Model
from tests.models.architectures import Case

# entries of config.json for weights that the reference quantized
KINDS: Mapping[str, Mapping[str, Any]] = {
    "affine-2": {"group_size": 32, "bits": 2, "mode": "affine"},
    "affine-3": {"group_size": 32, "bits": 3, "mode": "affine"},
    "affine-4": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine-5": {"group_size": 32, "bits": 5, "mode": "affine"},
    "affine-6": {"group_size": 32, "bits": 6, "mode": "affine"},
    "affine-8": {"group_size": 32, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}

# largest accepted difference of a logit. It is larger for the delta rule, which normalizes keys to
# length one however short they are: with it, a change of 1e-7 in the weights of norms changes the
# logits of tiny models by 1e-4
TOLERANCE, TOLERANCE_OF_DELTAS = 1e-4, 5e-4
DELTA_KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def tolerance(case: Case) -> float:
    return TOLERANCE_OF_DELTAS if case.config["model_type"] in DELTA_KINDS else TOLERANCE


def save_reference(case: Case, folder: Path, *, kind: str | None = None, seed: int = 0) -> Any:
    """Save a random model of mlx-lm's class into `folder` with mlx-lm, and return the model."""
    config = cast(dict[str, Any], json.loads(json.dumps(case.config)))
    model_class, args_class = utils._get_classes(config)
    # `draw_weights` adds to the vectors that the class initializes, some of them at random
    mx.random.seed(seed)
    model: Any = model_class(args_class.from_dict(config))
    draw_weights(model, seed)
    if kind is not None:
        model, config = utils.quantize_model(model, config, **KINDS[kind])
    folder.mkdir(parents=True, exist_ok=True)
    utils.save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    model.eval()
    return model


def save_converted(case: Case, folder: Path) -> dict[str, mx.array]:
    """The tensors of a random model, as mlx-lm saves them."""
    save_reference(case, folder)
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def load_model(folder: Path) -> Model:
    """Load our model from the same folder."""
    weights: dict[str, mx.array] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights.update(cast(dict[str, mx.array], mx.load(str(shard))))
    return architectures.build(json.loads((folder / "config.json").read_text()), weights)


def ids(case: Case, length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, case.vocab, length).tolist()


def prefill_reference(model: Any, prompt: Sequence[int]) -> np.ndarray:
    """Logits [L, V] of the reference."""
    return np.array(model(mx.array([prompt]), cache=make_prompt_cache(model))[0].astype(mx.float32))


def decode_reference(model: Any, prompt: Sequence[int]) -> np.ndarray:
    """Logits [L, V] of the reference, decoded token by token through its cache."""
    cache = make_prompt_cache(model)
    rows = [model(mx.array([[id]]), cache=cache)[0] for id in prompt]
    return np.array(mx.concatenate(rows).astype(mx.float32))


def prefill(model: Model, prompt: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
    """Logits [L, V] of our model, evaluated in chunks of the given lengths."""
    kv, start, rows = model.make_kv(), 0, list[mx.array]()
    for length in chunks:
        rows.append(model.logits(model(mx.array([prompt[start : start + length]]), kv))[0])
        start += length
    assert start == len(prompt)
    return np.array(mx.concatenate(rows).astype(mx.float32))


def decode_batch(
    model: Model, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]
) -> np.ndarray:
    """Logits [B, steps, V]: prompts of unequal lengths are prefilled alone and then decoded as one
    batch, with the ids of `steps`."""
    kvs = [model.make_kv() for _ in prompts]
    for prompt, kv in zip(prompts, kvs, strict=True):
        mx.eval(model(mx.array([prompt]), kv))
    rows: list[mx.array] = []
    for column in zip(*steps, strict=True):
        together = [
            layers[0].make_batch(layers, mx.array([layer.offset for layer in layers]))
            for layers in zip(*kvs, strict=True)
        ]
        hidden = model(mx.array(column)[:, None], together)
        rows.append(model.logits(hidden[:, -1]))
    return np.array(mx.stack(rows, axis=1).astype(mx.float32))


def find_differences(reference: Any, ours: Model, case: Case) -> dict[str, float]:
    """The largest difference of a logit: in a prefill, in a prefill of uneven chunks, in decoding
    token by token, and in a batch of unequal lengths."""
    prompt = ids(case, 23)
    expected = prefill_reference(reference, prompt)
    prompts = [ids(case, length, seed=length) for length in (3, 17, 9)]
    steps = [ids(case, 5, seed=100 + length) for length in (3, 17, 9)]
    alone = [
        decode_reference(reference, [*prompt, *more])[-5:]
        for prompt, more in zip(prompts, steps, strict=True)
    ]
    return {
        "prefill": max_difference(prefill(ours, prompt, [23]), expected),
        "pieces": max_difference(prefill(ours, prompt, [6, 1, 9, 7]), expected),
        "decode": max_difference(
            prefill(ours, prompt, [1] * 23), decode_reference(reference, prompt)
        ),
        "batch": max_difference(decode_batch(ours, prompts, steps), np.stack(alone)),
    }


def max_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of a logit."""
    assert ours.shape == theirs.shape
    assert np.ptp(theirs) > 0.1, "equal logits prove nothing"
    return float(np.abs(ours - theirs).max())


def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw float32 weights, large enough that every part of the model affects the logits."""
    rng = np.random.default_rng(seed)
    weights: list[tuple[str, mx.array]] = []
    flat: Any = tree_flatten(model.parameters())
    for name, array in flat:
        noise = rng.standard_normal(array.shape).astype(np.float32)
        if array.ndim > 1:
            weights.append((name, mx.array(noise / np.sqrt(array.shape[-1]))))
        else:
            weights.append((name, array.astype(mx.float32) + 0.1 * mx.array(noise)))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
