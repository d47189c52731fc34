"""Shapes of config.json and of weights that were seen in published models, each with its outcome.

A shape is a change of a complete checkpoint. Its outcome is a part of the error message, or the
logits of the same model in its plain form. tests/store/test_folder_shapes.py has the shapes of
folders and of the other files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from models.cpu_layout import apply_cpu_layout
from tests.models import parity
from tests.models.test_llama import TINY, draw_weights

CONFIG: dict[str, Any] = {**TINY, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 128}
IDS = np.random.default_rng(3).integers(0, 128, 23).tolist()

Weights = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """plain: the weights of the same model with CONFIG, or another config, in float32."""

    config: Mapping[str, Any]
    weights: Weights
    plain: Weights
    plain_config: Mapping[str, Any]


Change = Callable[[Checkpoint], Checkpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """error: a part of the message; empty if the model is built. differs: whether the logits differ
    from the model's, so that only the build is tested."""

    id: str
    change: Change
    error: str = ""
    differs: bool = False


def change_checkpoint(checkpoint: Checkpoint, **fields: Any) -> Checkpoint:
    names = ("config", "weights", "plain", "plain_config")
    return Checkpoint(**{name: fields.get(name, getattr(checkpoint, name)) for name in names})


def configure(**changes: Any) -> Change:
    """Changes keys of the config. None removes a key; NULL writes null."""

    def change(checkpoint: Checkpoint) -> Checkpoint:
        config = {**checkpoint.config, **changes}
        config = {k: None if v is NULL else v for k, v in config.items() if v is not None}
        return change_checkpoint(checkpoint, config=config)

    return change


NULL = object()


def quantize(kinds: Mapping[str, Mapping[str, Any] | None], **keys: Any) -> Change:
    """Quantizes the matrices whose names contain a key of `kinds`. keys: added to the config."""

    def change(checkpoint: Checkpoint) -> Checkpoint:
        weights: dict[str, mx.array] = {}
        plain: dict[str, mx.array] = {}
        for name, array in checkpoint.weights.items():
            kind = next((kind for part, kind in kinds.items() if part in name), None)
            if array.ndim < 2 or kind is None:
                weights[name] = plain[name] = array
                continue
            size, bits, mode = (kind[key] for key in ("group_size", "bits", "mode"))
            parts = mx.quantize(array, size, bits, mode=mode)
            path = name.removesuffix(".weight")
            for part, value in zip(("weight", "scales", "biases"), parts, strict=False):
                weights[f"{path}.{part}"] = value
            plain[name] = (
                mx.dequantize(*parts, size, bits, mode=mode, dtype=mx.float32)
                if (len(parts) == 3)
                else mx.dequantize(parts[0], parts[1], None, size, bits, mode, dtype=mx.float32)
            )
        made = change_checkpoint(checkpoint, weights=weights, plain=plain)
        return configure(**keys)(made)

    return change


def affine(bits: int, group_size: int = 64) -> dict[str, Any]:
    return {"group_size": group_size, "bits": bits, "mode": "affine"}


MXFP4, MXFP8, NVFP4 = (parity.KINDS[kind] for kind in ("mxfp4", "mxfp8", "nvfp4"))
FOUR = affine(4)
MIXED = {
    "lm_head": None,
    "embed": affine(6),
    "q_proj": MXFP8,
    "down": MXFP4,
    "up_proj": NVFP4,
    "": FOUR,
}
MIXED_MAP = {
    **FOUR,
    "lm_head": False,
    "model.embed_tokens": affine(6),
    **{f"model.layers.{layer}.self_attn.q_proj": MXFP8 for layer in range(2)},
    **{f"model.layers.{layer}.mlp.down_proj": MXFP4 for layer in range(2)},
    **{f"model.layers.{layer}.mlp.up_proj": NVFP4 for layer in range(2)},
}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "data_type": "int",
    "iters": 200,
    "sym": True,
}


def cast_weights(dtype: mx.Dtype, *, norms: mx.Dtype | None = None) -> Change:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        stored = {
            name: array.astype(norms if norms is not None and "norm" in name else dtype)
            for name, array in checkpoint.weights.items()
        }
        plain = {name: array.astype(mx.float32) for name, array in stored.items()}
        return change_checkpoint(checkpoint, weights=stored, plain=plain)

    return change


def rename(old: str, new: str, *others: str, **config: Any) -> Change:
    """Renames the tensors, and adds modules of other parts of the model. The config becomes the
    text config of `config`, if it is given."""

    def change(checkpoint: Checkpoint) -> Checkpoint:
        named = {
            new + name.removeprefix(old) if name.startswith(old) else name: array
            for name, array in checkpoint.weights.items()
        }
        named |= {f"{other}.weight": mx.zeros((3,)) for other in others}
        given = {**config, "text_config": checkpoint.config} if config else checkpoint.config
        return change_checkpoint(checkpoint, weights=named, config=given)

    return change


def tie(*, head: bool, key: bool | None) -> Change:
    """The head is the embedding. head: whether it is in the file. key: tie_word_embeddings."""

    def change(checkpoint: Checkpoint) -> Checkpoint:
        embedding = checkpoint.weights["model.embed_tokens.weight"]
        weights = {**checkpoint.weights, "lm_head.weight": embedding}
        stored = dict(weights)
        if not head:
            del stored["lm_head.weight"]
        config = {k: v for k, v in checkpoint.config.items() if k != "tie_word_embeddings"}
        if key is not None:
            config["tie_word_embeddings"] = key
        return change_checkpoint(checkpoint, weights=stored, plain=weights, config=config)

    return change


def apply_all(*changes: Change) -> Change:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        for one in changes:
            checkpoint = one(checkpoint)
        return checkpoint

    return change


def drop(name: str) -> Change:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        weights = {key: array for key, array in checkpoint.weights.items() if key != name}
        return change_checkpoint(checkpoint, weights=weights)

    return change


def all_heads(checkpoint: Checkpoint) -> Checkpoint:
    """As many key heads as query heads, which is the default."""
    config = {**checkpoint.config, "num_key_value_heads": 4}
    weights = draw_weights(config)
    without = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    return Checkpoint(config=without, weights=weights, plain=weights, plain_config=config)


def rope(**scaling: Any) -> Change:
    return configure(rope_scaling=scaling)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
SEES = {"model_type": "sees", "vision_config": {"hidden_size": 8}}
METHODS = ("bitsandbytes", "torchao", "hqq", "bitnet", "quanto", "eetq", "higgs")

SHAPES: Sequence[Shape] = [
    Shape(id="plain", change=lambda checkpoint: checkpoint),
    # packings
    *(
        Shape(id=f"{bits} bits", change=quantize({"": affine(bits)}, quantization=affine(bits)))
        for bits in (1, 2, 3, 4, 5, 6, 8)
    ),
    *(
        Shape(
            id=f"groups of {size}",
            change=quantize({"": affine(4, size)}, quantization=affine(4, size)),
        )
        for size in (32, 128)
    ),
    Shape(id="mxfp4", change=quantize({"": MXFP4}, quantization=MXFP4)),
    Shape(id="mxfp8", change=quantize({"": MXFP8}, quantization=MXFP8)),
    Shape(id="nvfp4", change=quantize({"": NVFP4}, quantization=NVFP4)),
    Shape(id="a map with five formats and false", change=quantize(MIXED, quantization=MIXED_MAP)),
    Shape(id="no quantization key", change=quantize({"": FOUR})),
    Shape(id="an empty quantization key", change=quantize({"": FOUR}, quantization={})),
    Shape(id="quantization null", change=quantize({"": FOUR}, quantization=NULL)),
    Shape(
        id="a contradicting quantization_config",
        change=quantize({"": FOUR}, quantization=FOUR, quantization_config=affine(8, 32)),
    ),
    Shape(
        id="the method of the source in quantization_config",
        change=quantize({"": FOUR}, quantization=FOUR, quantization_config={"quant_method": "fp8"}),
    ),
    Shape(
        id="a map of AutoRound",
        change=quantize(MIXED, quantization={**AUTO_ROUND, **MIXED_MAP}),
    ),
    *(
        Shape(
            id=f"{method} declared",
            change=configure(quantization_config={"quant_method": method}),
            error=f"quantized with '{method}' are not supported",
        )
        for method in METHODS
    ),
    Shape(
        id="bitsandbytes in the text config",
        change=apply_all(
            configure(quantization_config={"quant_method": "bitsandbytes"}),
            rename("", "language_model.", **SEES),
        ),
        error="quantized with 'bitsandbytes' are not supported",
    ),
    Shape(
        id="fp8 without scales",
        change=lambda checkpoint: change_checkpoint(
            checkpoint,
            weights={
                name: mx.to_fp8(array) if "proj" in name else array
                for name, array in checkpoint.weights.items()
            },
        ),
        error="down_proj.weight (uint8, expected floating point)",
    ),
    # types
    Shape(id="float16", change=cast_weights(mx.float16)),
    Shape(id="bfloat16", change=cast_weights(mx.bfloat16)),
    Shape(id="norms in float32", change=cast_weights(mx.bfloat16, norms=mx.float32)),
    # heads
    Shape(id="tied with a head in the file", change=tie(head=True, key=True)),
    Shape(id="tied without a head", change=tie(head=False, key=True)),
    Shape(id="the tie key is missing with a head", change=tie(head=True, key=None)),
    Shape(id="the tie key is missing without a head", change=tie(head=False, key=None)),
    Shape(
        id="not tied and no head",
        change=tie(head=False, key=False),
        error="lacks tensors: lm_head.weight",
    ),
    # rope
    *(
        Shape(id=f"rope {name}", change=change)
        for name, change in {
            "default": rope(rope_type="default"),
            "empty": configure(rope_scaling={}),
            "null": configure(rope_scaling=NULL),
            "dynamic": rope(type="dynamic", factor=2.0),
            "mrope": rope(type="mrope", mrope_section=[4, 6, 6]),
            "missing": configure(rope_theta=None),
            "in the newer form": configure(
                rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
            ),
            "in both forms": configure(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        }.items()
    ),
    *(
        Shape(id=f"rope {name}", change=change, differs=True)
        for name, change in {
            "llama3": rope(rope_type="llama3", **LLAMA3, **ORIGINAL),
            "yarn": rope(**YARN),
            "yarn with nulls": rope(**YARN, beta_fast=None, mscale=None, attention_factor=None),
            "linear": rope(type="linear", factor=2.0),
            "longrope": rope(
                rope_type="longrope",
                long_factor=[2.0] * 16,
                short_factor=[1.0] * 16,
                **ORIGINAL,
            ),
            "proportional": rope(rope_type="proportional", partial_rotary_factor=0.5),
        }.items()
    ),
    Shape(
        id="rope ntk",
        change=rope(type="ntk", factor=2.0),
        error="rope scaling 'ntk' is not supported",
    ),
    # other keys
    Shape(id="head_dim null", change=configure(head_dim=NULL)),
    *(
        Shape(id=f"a window of {name}", change=configure(sliding_window=value))
        for name, value in (("null", NULL), ("-1", -1), ("0", 0))
    ),
    Shape(id="the number of key heads is missing", change=all_heads),
    Shape(id="unknown keys", change=configure(new_key=[1], other={"a": None})),
    Shape(id="neutral values", change=configure(logits_scaling=1.0, attn_logit_softcapping=NULL)),
    *(
        Shape(id=f"{key} of another architecture", change=configure(**{key: value}), error=key)
        for key, value in {
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 128,
            "residual_multiplier": 0.22,
            "attention_chunk_size": 8,
            "logit_scale": 0.5,
        }.items()
    ),
    Shape(
        id="a number as a text",
        change=configure(rms_norm_eps="1e-06"),
        error="rms_norm_eps is '1e-06', but must be a number",
    ),
    Shape(
        id="a size as a float",
        change=configure(hidden_size=128.0),
        error="hidden_size is 128.0, but must be an integer",
    ),
    Shape(
        id="a key is missing",
        change=configure(num_hidden_layers=None),
        error="config.json lacks num_hidden_layers",
    ),
    # models of other kinds
    *(
        Shape(
            id=f"model_type {kind}",
            change=configure(model_type=kind, auto_map={"AutoModel": "modeling.Model"}),
            error=f"model_type {kind!r} is not supported, and mlx-lm does not support it either",
        )
        for kind in ("whisper", "t5", "clip", "mine")
    ),
    *(
        Shape(
            id=f"draft model {keys}",
            change=configure(**keys),
            error="config.json describes a draft model for speculative decoding (model_type",
        )
        for keys in (
            {"model_type": "gemma4_assistant"},
            {"model_type": "qwen3_5_mtp"},
            {"architectures": ["LlamaForCausalLMEagle3"]},
            {"architectures": ["Eagle3LlamaForCausalLM"]},
            {"architectures": ["DFlashDraftModel"]},
        )
    ),
    Shape(
        id="architectures of other models",
        change=configure(architectures=["Eagle2_5_VLForConditionalGeneration", None]),
    ),
    # multimodal
    Shape(
        id="a text config",
        change=rename("", "language_model.", "vision_tower.x", **SEES),
    ),
    Shape(
        id="a text config as transformers 5 saves it",
        change=rename("model.", "model.language_model.", "model.visual.blocks.0.x", **SEES),
    ),
    Shape(
        id="a vision tower inside the language model",
        change=rename("", "language_model.", "language_model.vision_tower.x", **SEES),
    ),
    Shape(id="vision_config null", change=configure(vision_config=NULL)),
    Shape(
        id="text keys on the top level",
        change=apply_all(
            rename("model.", "model.", "visual.x"), configure(vision_config={"hidden_size": 8})
        ),
    ),
    # tensors
    Shape(
        id="a tensor is missing",
        change=drop("model.layers.1.mlp.up_proj.weight"),
        error="lacks tensors: model.layers.1.mlp.up_proj.weight",
    ),
    Shape(
        id="a tensor too many",
        change=rename("model.", "model.", "model.layers.1.mlp.new"),
        error="unexpected tensors: model.layers.1.mlp.new.weight",
    ),
]


def compute(config: Mapping[str, Any], weights: Weights) -> np.ndarray:
    model = architectures.build(config, dict(weights))
    apply_cpu_layout(cast(nn.Module, model))
    return parity.prefill(model, IDS, [len(IDS)])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.id)
def test_a_checkpoint_loads_or_its_fault_is_named(shape: Shape) -> None:
    weights = draw_weights(CONFIG)
    checkpoint = shape.change(
        Checkpoint(config=CONFIG, weights=weights, plain=weights, plain_config=CONFIG)
    )
    if shape.error:
        with pytest.raises(ModelError) as caught:
            architectures.build(checkpoint.config, dict(checkpoint.weights))
        assert shape.error in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    found = compute(checkpoint.config, checkpoint.weights)
    expected = compute(checkpoint.plain_config, checkpoint.plain)
    if shape.differs:
        assert np.abs(found - expected).max() > 1e-3, "the key changes the rotation"
    else:
        np.testing.assert_allclose(found, expected, atol=1e-4)
