"""Writes tests/models/image_reference.json: the output of transformers for tiny text models whose
prompts have image rows.

It needs torch, and therefore the environment of `make parity` (requirements/parity.in):

    python -m tests.models.image_reference [CASE …]

The vision towers are not evaluated: their outputs are drawn. A tensor of a checkpoint is drawn from
its name, so that the file contains only shapes.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.models.encoder_reference import draw_tensor

FILE = Path(__file__).with_name("image_reference.json")

VOCAB, HIDDEN, IMAGE = 40, 64, 39


class Image(NamedTuple):
    """The image rows [start, end) of a prompt, in a grid."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


# The parts of each prompt: a number of text tokens, or the grid of an image. transformers needs
# text between images.
LAYOUTS: Mapping[str, Sequence[int | tuple[int, int]]] = {
    "one": (4, (2, 3), 3),
    "first": ((3, 2), 1, (1, 4), 2),
    "last": (5, (2, 2)),
    "five": (2, (2, 2), 1, (1, 3), 1, (4, 1), 2, (2, 3), 1, (1, 1), 2),
}

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 38,
    "vision_start_token_id": 37,
    "vision_end_token_id": 36,
}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_INTERLEAVED = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
_GEMMA4_TEXT = {
    **_TEXT,
    "tie_word_embeddings": True,
    "sliding_window": 8,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "num_hidden_layers": 6,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
}
_GEMMA4_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 38,
    "audio_token_id": 37,
    "boi_token_id": 36,
    "eoi_token_id": 35,
    "boa_token_id": 34,
    "eoa_token_index": 33,
}

# name: the class of transformers, the arguments of its config, the number of layers with DeepStack
CASES: Mapping[str, tuple[str, Mapping[str, Any], int]] = {
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {**_INTERLEAVED, "mrope_section": [4, 2, 2]},
            },
            "vision_config": _QWEN_VISION,
            **_QWEN_IDS,
        },
        2,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                **_EXPERTS,
                "rope_parameters": {**_INTERLEAVED, "mrope_section": [4, 2, 2]},
            },
            "vision_config": _QWEN_VISION,
            **_QWEN_IDS,
        },
        3,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **{key: value for key, value in _TEXT.items() if key != "head_dim"},
                "hidden_size": HIDDEN,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [4, 6, 6],
                },
            },
            "vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]},
            **_QWEN_IDS,
        },
        0,
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "head_dim": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 4,
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "rope_parameters": {
                    **_INTERLEAVED,
                    "mrope_section": [2, 1, 1],
                    "partial_rotary_factor": 0.25,
                },
            },
            "vision_config": _QWEN_VISION,
            **_QWEN_IDS,
        },
        0,
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "tie_word_embeddings": True,
                "sliding_window": 8,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": 36,
            "eoi_token_index": 35,
        },
        0,
    ),
    "gemma4-small": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **_GEMMA4_TEXT,
                "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 2,
            },
            "vision_config": _GEMMA4_VISION,
            "audio_config": None,
            **_GEMMA4_IDS,
        },
        0,
    ),
    "gemma4-large": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **_GEMMA4_TEXT,
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
                "attention_k_eq_v": True,
            },
            "vision_config": _GEMMA4_VISION,
            "audio_config": None,
            **_GEMMA4_IDS,
        },
        0,
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **_SIGLIP},
            "image_token_index": IMAGE,
        },
        0,
    ),
    "ministral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "model_type": "ministral3",
                "sliding_window": None,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 8,
                    "llama_4_scaling_beta": 0.3,
                    "beta_fast": 4.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
            "vision_config": {"model_type": "pixtral", **_SIGLIP},
            "image_token_index": IMAGE,
        },
        0,
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": _SIGLIP,
            "image_token_id": IMAGE,
            "pad_token_id": 0,
        },
        0,
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        {
            "text_config": {
                **{key: value for key, value in _TEXT.items() if key != "head_dim"},
                "model_type": "lfm2",
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "block_auto_adjust_ff_dim": False,
                "layer_types": ["conv", "full_attention"] * 2,
            },
            "vision_config": {"model_type": "siglip2_vision_model", **_SIGLIP},
            "image_token_id": IMAGE,
        },
        0,
    ),
}


def list_images(layout: str) -> list[Image]:
    """The image rows of a prompt."""
    images: list[Image] = []
    index = 0
    for part in LAYOUTS[layout]:
        if isinstance(part, tuple):
            images.append(Image(index, *part))
        index += part if isinstance(part, int) else part[0] * part[1]
    return images


def draw_ids(layout: str) -> list[int]:
    """The token IDs of a prompt, with IMAGE at image rows."""
    count = sum(part if isinstance(part, int) else part[0] * part[1] for part in LAYOUTS[layout])
    ids = np.random.default_rng(len(layout)).integers(3, 33, count).tolist()
    for image in list_images(layout):
        ids[image.start : image.end] = [IMAGE] * (image.end - image.start)
    return ids


def draw_features(layout: str, name: str) -> np.ndarray:
    """The features of all image rows of a prompt, [N, HIDDEN]. name: "rows", or that of a layer."""
    count = sum(image.end - image.start for image in list_images(layout))
    return np.float32(3) * draw_tensor(f"{layout} {name}", (count, HIDDEN))


def draw_weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """A tensor of a checkpoint. Larger matrices and sharper attention would increase differences of
    rounding."""
    drawn = draw_tensor(name, shape)
    if name.endswith("q_norm.weight"):
        return np.float32(0.4) * drawn
    return drawn if len(shape) == 1 else np.float32(0.7) * drawn


def main(names: Sequence[str]) -> None:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names or CASES:
        found[name] = _compute(*CASES[name])
        print(name)
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def _compute(kind: str, arguments: Mapping[str, Any], num_deepstack: int) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers
    import transformers.modeling_outputs
    from safetensors.numpy import load_file, save_file

    # in float32, the logits of Gemma 4 would differ by 5e-5 between processors; torch's product of
    # experts supports no float64
    dtype = torch.float32 if "Moe" in kind else torch.float64
    make: Any = getattr(transformers, kind)
    config = make.config_class(**arguments)
    with tempfile.TemporaryDirectory() as folder:
        make(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {name: list(array.shape) for name, array in load_file(file).items()}
        drawn = {name: draw_weight(name, shape) for name, shape in shapes.items()}
        save_file(drawn, file, metadata={"format": "pt"})
        model = make.from_pretrained(folder, attn_implementation="eager").to(dtype).eval()
        saved = json.loads((Path(folder) / "config.json").read_text())
    saved.pop("transformers_version", None)
    logits: dict[str, Any] = {}
    positions: dict[str, Any] = {}
    for layout in LAYOUTS:
        ids = torch.tensor([draw_ids(layout)])
        images = list_images(layout)
        grids = torch.tensor([[1, 2 * image.rows, 2 * image.columns] for image in images])
        rows = torch.tensor(draw_features(layout, "rows")).to(dtype)
        sizes = [image.end - image.start for image in images]
        features = transformers.modeling_outputs.BaseModelOutputWithPooling(
            pooler_output=rows if kind.startswith(("Gemma3", "SmolVLM")) else rows.split(sizes)
        )
        features.deepstack_features = [
            torch.tensor(draw_features(layout, f"layer {layer}")).to(dtype).split(sizes)
            for layer in range(num_deepstack)
        ]
        model.model.get_image_features = lambda *_, _features=features, **__: _features
        given: dict[str, Any] = {
            "input_ids": ids,
            "pixel_values": torch.zeros(1, 1, 3, 28, 28).to(dtype),
        }
        types = (ids == IMAGE).int()
        if kind.startswith("Qwen"):
            given |= {"mm_token_type_ids": types, "image_grid_thw": grids}
            found, _ = model.model.get_rope_index(ids, types, image_grid_thw=grids)
            positions[layout] = found[:, 0].tolist()
        elif kind.startswith("Gemma3"):
            given["token_type_ids"] = types
        elif kind.startswith("Gemma4"):
            given["mm_token_type_ids"] = types
        elif kind.startswith("Mistral3"):
            given["image_sizes"] = torch.zeros(len(images), 2)
        elif kind.startswith("Lfm2"):
            given |= {"spatial_shapes": grids[:, 1:], "pixel_attention_mask": types}
        with torch.no_grad():
            output = model(**given).logits[0]
        logits[layout] = [[float(f"{value:.8g}") for value in row] for row in output.tolist()]
    text = {name: shape for name, shape in shapes.items() if not _is_vision(name)}
    return {"config": saved, "tensors": text, "logits": logits, "positions": positions}


def _is_vision(name: str) -> bool:
    parts = ("visual.", "vision", "multi_modal_projector.", "connector.")
    return any(part in name for part in parts)


if __name__ == "__main__":
    main(sys.argv[1:])
