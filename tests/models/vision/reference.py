"""Writes tests/models/vision/reference.json: the output of transformers for tiny vision towers.

It needs torch, and therefore the environment of `make parity` (requirements/parity.in):

    python -m tests.models.vision.reference [CASE…]

A tensor of a checkpoint is drawn from its name, and pixels from the size of the image, so that the
file contains only shapes and outputs. The weights are large, because with small ones the residual
stream hides errors.
"""

import base64
import json
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("reference.json")

# the height and the width of each tile of an image
Sizes = Sequence[tuple[int, int]]

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_QWEN3: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
}


_SIGLIP: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_GEMMA4: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "position_embedding_size": 32,
}
_PIXTRAL: dict[str, Any] = {**_SIGLIP, "model_type": "pixtral", "image_size": 280}

CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])


@dataclass(frozen=True, kw_only=True)
class Case:
    """kind: the class of transformers. images: the tiles of each image. compute: see `_qwen`."""

    kind: str
    config: Mapping[str, Any]
    images: Sequence[Sizes]
    compute: Callable[[Any, Sequence[np.ndarray]], list[Any]]


def draw_tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """The tensor of a checkpoint, drawn from its name."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1:
        return (0.15 * drawn).astype(np.float32)
    middle = {"weight": 1, "min": -3, "max": 3}.get(re.split("[._]", name)[-1], 0)
    return np.asarray(0.3 * drawn + middle, np.float32)


def draw_image(sizes: Sizes) -> list[np.ndarray]:
    """The tiles of an image, uint8."""
    rng = np.random.default_rng(list(np.ravel(sizes)))
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def normalize(tile: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """The values of pixels [height, width, 3], with the arithmetic of transformers' processors."""
    scaled = (tile.astype(np.float64) * (1 / 255)).astype(np.float32)
    return (scaled - np.array(mean, np.float32)) / np.array(std, np.float32)


def decode(text: str, hidden: int) -> np.ndarray:
    """The rows [T, hidden] in the file."""
    return np.frombuffer(base64.b64decode(text), np.float32).reshape(-1, hidden)


def make_qwen_patches(values: np.ndarray, patch: int, merge: int) -> tuple[np.ndarray, list[int]]:
    """Values [height, width, 3] in the layout of Qwen2VLImageProcessor, with their grid."""
    rows, cols = values.shape[0] // patch, values.shape[1] // patch
    x = values.transpose(2, 0, 1)
    x = x.reshape(3, rows // merge, merge, patch, cols // merge, merge, patch)
    x = x.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    x = np.broadcast_to(x, (*x.shape[:5], 2, *x.shape[6:]))
    return x.reshape(rows * cols, -1), [1, rows, cols]


def _qwen3(model: Any, tiles: Sequence[np.ndarray]) -> list[Any]:
    """Returns the rows and the DeepStack rows of an image."""
    import torch  # pyright: ignore[reportMissingImports]

    patches, grid = make_qwen_patches(normalize(tiles[0], [0.5] * 3, [0.5] * 3), 16, 2)
    found = model.model.visual(torch.tensor(patches), torch.tensor([grid]))
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]


def _gemma3(model: Any, tiles: Sequence[np.ndarray]) -> list[Any]:
    import torch  # pyright: ignore[reportMissingImports]

    values = normalize(tiles[0], [0.5] * 3, [0.5] * 3).transpose(2, 0, 1)
    found = model.model.get_image_features(torch.tensor(np.ascontiguousarray(values[None])))
    return [found.pooler_output[0]]


def _gemma4(model: Any, tiles: Sequence[np.ndarray]) -> list[Any]:
    import torch  # pyright: ignore[reportMissingImports]

    # the files of processors: without torchvision, only they can be imported
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        convert_image_to_patches,
    )

    values = normalize(tiles[0], [0.0] * 3, [1.0] * 3).transpose(2, 0, 1)
    patches, positions = convert_image_to_patches(values, 16), _positions(tiles[0], 16)
    found = model.model.get_image_features(torch.tensor(patches[None]), positions)
    return [found.pooler_output[0]]


def _gemma4_unified(model: Any, tiles: Sequence[np.ndarray]) -> list[Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import (
        convert_image_to_patches,
        patches_merge,
    )

    values = normalize(tiles[0], [0.0] * 3, [1.0] * 3).transpose(2, 0, 1)
    patches = convert_image_to_patches(torch.tensor(np.ascontiguousarray(values)), 16)
    merged, places = patches_merge(patches[None], _positions(tiles[0], 16), len(patches) // 9)
    found = model.model.get_image_features(merged, places)
    return [found.pooler_output[0]]


def _positions(tile: np.ndarray, patch: int) -> Any:
    """The column and the row of each patch, in row-major order."""
    import torch  # pyright: ignore[reportMissingImports]

    rows, cols = tile.shape[0] // patch, tile.shape[1] // patch
    y, x = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    return torch.tensor(np.stack([x, y], axis=-1).reshape(1, -1, 2))


def _pixtral(model: Any, tiles: Sequence[np.ndarray]) -> list[Any]:
    import torch  # pyright: ignore[reportMissingImports]

    values = normalize(tiles[0], *CLIP).transpose(2, 0, 1)
    found = model.model.get_image_features(
        torch.tensor(np.ascontiguousarray(values[None])),
        image_sizes=torch.tensor([values.shape[1:]]),
        vision_feature_layer=-1,
    )
    rows = found.pooler_output
    return [rows[0] if isinstance(rows, list | tuple) or rows.ndim > 2 else rows]


def _qwen2(model: Any, tiles: Sequence[np.ndarray]) -> list[Any]:
    import torch  # pyright: ignore[reportMissingImports]

    patches, grid = make_qwen_patches(normalize(tiles[0], *CLIP), 14, 2)
    return [model.model.visual(torch.tensor(patches), torch.tensor([grid])).pooler_output]


def _smolvlm(model: Any, tiles: Sequence[np.ndarray]) -> list[Any]:
    import torch  # pyright: ignore[reportMissingImports]

    values = [normalize(tile, [0.5] * 3, [0.5] * 3).transpose(2, 0, 1) for tile in tiles]
    found = model.model.get_image_features(torch.tensor(np.stack(values)[None]))
    return [torch.cat(list(found.pooler_output))]


def _lfm2(model: Any, tiles: Sequence[np.ndarray]) -> list[Any]:
    """The processor pads the patches of all tiles to the same number."""
    import torch  # pyright: ignore[reportMissingImports]

    most = max(tile.size for tile in tiles) // (3 * 16 * 16)
    patches = np.zeros((len(tiles), most, 3 * 16 * 16), np.float32)
    mask = np.zeros((len(tiles), most), np.int64)
    shapes = [(tile.shape[0] // 16, tile.shape[1] // 16) for tile in tiles]
    for number, (tile, (rows, cols)) in enumerate(zip(tiles, shapes, strict=True)):
        values = normalize(tile, [0.5] * 3, [0.5] * 3).reshape(rows, 16, cols, 16, 3)
        flat = values.transpose(0, 2, 1, 3, 4).reshape(rows * cols, -1)
        patches[number, : len(flat)], mask[number, : len(flat)] = flat, 1
    found = model.model.get_image_features(
        torch.tensor(patches), torch.tensor(shapes), torch.tensor(mask)
    )
    return [torch.cat(list(found.pooler_output))]


_GEMMA4_TEXT: dict[str, Any] = {
    **_TEXT,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention"],
}
_GEMMA4_IMAGES: Sequence[Sizes] = ([(96, 144)], [(48, 48)])
_QWEN3_IMAGES: Sequence[Sizes] = ([(64, 96)], [(32, 32)], [(160, 32)])

CASES: Mapping[str, Case] = {
    "qwen3_vl": Case(
        kind="Qwen3VLForConditionalGeneration",
        config={
            "text_config": _TEXT,
            "vision_config": {**_QWEN3, "deepstack_visual_indexes": [0, 2]},
        },
        images=_QWEN3_IMAGES,
        compute=_qwen3,
    ),
    "qwen3_5": Case(
        kind="Qwen3_5ForConditionalGeneration",
        config={
            "text_config": {**_TEXT, "layer_types": ["full_attention"]},
            "vision_config": _QWEN3,
        },
        images=_QWEN3_IMAGES,
        compute=_qwen3,
    ),
    "gemma3": Case(
        kind="Gemma3ForConditionalGeneration",
        config={
            "text_config": _TEXT,
            "vision_config": {**_SIGLIP, "image_size": 112, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
        images=([(112, 112)],),
        compute=_gemma3,
    ),
    "gemma4": Case(
        kind="Gemma4ForConditionalGeneration",
        config={"text_config": _GEMMA4_TEXT, "vision_config": _GEMMA4, "audio_config": None},
        images=_GEMMA4_IMAGES,
        compute=_gemma4,
    ),
    "gemma4-clipped": Case(
        kind="Gemma4ForConditionalGeneration",
        config={
            "text_config": _GEMMA4_TEXT,
            "vision_config": {
                **_GEMMA4,
                "num_key_value_heads": 2,
                "use_clipped_linears": True,
                "standardize": True,
            },
            "audio_config": None,
        },
        images=_GEMMA4_IMAGES,
        compute=_gemma4,
    ),
    "gemma4_unified": Case(
        kind="Gemma4UnifiedForConditionalGeneration",
        config={
            "text_config": _GEMMA4_TEXT,
            "vision_config": {"mm_embed_dim": 40, "mm_posemb_size": 24, "output_proj_dims": 40},
            "audio_config": None,
        },
        images=_GEMMA4_IMAGES,
        compute=_gemma4_unified,
    ),
    "mistral3": Case(
        kind="Mistral3ForConditionalGeneration",
        config={
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_PIXTRAL, "patch_size": 14},
        },
        images=([(56, 84)], [(28, 56)], [(28, 140)]),
        compute=_pixtral,
    ),
    "mistral3-silu": Case(
        kind="Mistral3ForConditionalGeneration",
        config={
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {
                **_PIXTRAL,
                "patch_size": 14,
                "hidden_act": "silu",
                "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
            },
            "multimodal_projector_bias": True,
        },
        images=([(56, 84)],),
        compute=_pixtral,
    ),
    "pixtral": Case(
        kind="LlavaForConditionalGeneration",
        config={
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_PIXTRAL, "patch_size": 16},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        images=([(48, 32)], [(16, 80)]),
        compute=_pixtral,
    ),
    "qwen2_5_vl": Case(
        kind="Qwen2_5_VLForConditionalGeneration",
        config={
            "text_config": _TEXT,
            "vision_config": {
                "depth": 3,
                "hidden_size": 48,
                "intermediate_size": 90,
                "num_heads": 4,
                "out_hidden_size": 32,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
        images=([(140, 84)], [(28, 28)], [(56, 112)]),
        compute=_qwen2,
    ),
    "qwen2_vl": Case(
        kind="Qwen2VLForConditionalGeneration",
        config={
            "text_config": _TEXT,
            "vision_config": {
                "depth": 3,
                "embed_dim": 48,
                "hidden_size": 32,
                "mlp_ratio": 2,
                "num_heads": 4,
            },
        },
        images=([(140, 84)], [(28, 28)], [(56, 112)]),
        compute=_qwen2,
    ),
    "smolvlm": Case(
        kind="SmolVLMForConditionalGeneration",
        config={
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_SIGLIP, "image_size": 64, "patch_size": 8},
            "scale_factor": 4,
        },
        images=([(64, 64)] * 3, [(64, 64)]),
        compute=_smolvlm,
    ),
    "idefics3": Case(
        kind="Idefics3ForConditionalGeneration",
        config={
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_SIGLIP, "image_size": 70, "patch_size": 16},
        },
        images=([(70, 70)] * 2,),
        compute=_smolvlm,
    ),
    "lfm2_vl": Case(
        kind="Lfm2VlForConditionalGeneration",
        config={
            "text_config": {**_TEXT, "model_type": "lfm2", "layer_types": ["full_attention"]},
            "vision_config": {
                **_SIGLIP,
                "model_type": "siglip2_vision_model",
                "patch_size": 16,
                "num_patches": 36,
                "vision_use_head": False,
            },
            "projector_hidden_size": 40,
        },
        images=([(64, 96), (32, 32)], [(160, 224)], [(32, 64)]),
        compute=_lfm2,
    ),
}


def main(names: Sequence[str]) -> None:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names or CASES:
        found[name] = _compute(CASES[name])
    FILE.write_text(json.dumps(found, sort_keys=True, separators=(",", ":")) + "\n")


def save_checkpoint(case: Case, folder: Path) -> Any:
    """Saves a model with drawn weights and returns it."""
    import transformers
    from safetensors.numpy import load_file, save_file

    make: Any = getattr(transformers, case.kind)
    make(make.config_class(**case.config)).save_pretrained(folder)
    file = folder / "model.safetensors"
    shapes = {name: array.shape for name, array in load_file(file).items()}
    drawn = {name: draw_tensor(name, shape) for name, shape in shapes.items()}
    save_file(drawn, file, metadata={"format": "pt"})
    return make.from_pretrained(folder, attn_implementation="eager").eval()


def _compute(case: Case) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = save_checkpoint(case, folder)
        config = json.loads((folder / "config.json").read_text())
        saved = load_file(folder / "model.safetensors")
    shapes = {
        name: list(array.shape)
        for name, array in saved.items()
        if re.search("vision|visual|connector|projector", name)
    }
    with torch.no_grad():
        outputs = [case.compute(model, draw_image(sizes)) for sizes in case.images]
    return {
        "config": {key: config[key] for key in config if key != "transformers_version"},
        "tensors": shapes,
        "outputs": [[_encode(rows) for rows in image] for image in outputs],
    }


def _encode(rows: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(rows.numpy(), np.float32).tobytes()).decode()


if __name__ == "__main__":
    main(sys.argv[1:])
