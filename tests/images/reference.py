"""The pixels and the prompt texts that transformers' image processors return, for comparison.

    python -m tests.images.reference          writes reference.json, which the tests read
    python -m tests.images.reference PHOTO…   compares our plans with transformers, for any photos

The processors are those that resize with Pillow. Their pixels are compared before normalization, as
8-bit values, which is what a plan describes.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image as PillowImage

from app.images.decoder_main import decode
from tests.images.models import load
from tests.images.samples import encode, read

PHOTOS = Path(__file__).parent / "photos"
FILE = Path(__file__).parent / "reference.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family, with the settings of published files.

    config: of config.json. settings: of the image processor. name: the class of transformers.
    patch, merge: the size of its patches, and of the blocks in which they are ordered; 0 if it
    returns whole tiles.
    """

    model_type: str
    name: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    patch: int = 0
    merge: int = 1


def _smolvlm(model_type: str, side: int, patch: int, scale: int) -> Family:
    return Family(
        model_type=model_type,
        name="SmolVLMImageProcessorPil" if model_type == "smolvlm" else "Idefics3ImageProcessorPil",
        settings={
            "size": {"longest_edge": 4 * side},
            "max_image_size": {"longest_edge": side},
        },
        config={
            "vision_config": {"image_size": side, "patch_size": patch},
            "scale_factor": scale,
        },
    )


FAMILIES: Mapping[str, Family] = {
    "qwen3-vl": Family(
        model_type="qwen3_vl",
        name="Qwen2VLImageProcessorPil",
        settings={
            "patch_size": 16,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        },
        config={"vision_config": {"patch_size": 16}},
        patch=16,
        merge=2,
    ),
    "qwen2.5-vl": Family(
        model_type="qwen2_5_vl",
        name="Qwen2VLImageProcessorPil",
        settings={"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056},
        config={"vision_config": {"patch_size": 14}},
        patch=14,
        merge=2,
    ),
    "gemma3": Family(
        model_type="gemma3",
        name="Gemma3ImageProcessorPil",
        settings={"size": {"height": 896, "width": 896}},
        config={"vision_config": {"image_size": 896}, "mm_tokens_per_image": 256},
    ),
    "gemma4": Family(
        model_type="gemma4",
        name="Gemma4ImageProcessorPil",
        settings={"max_soft_tokens": 280},
        config={"vision_config": {"patch_size": 16}},
        patch=16,
    ),
    "mistral3": Family(
        model_type="mistral3",
        name="PixtralImageProcessorPil",
        settings={"size": {"longest_edge": 1540}, "patch_size": {"height": 28, "width": 28}},
        config={"vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
    ),
    "pixtral": Family(
        model_type="pixtral",
        name="PixtralImageProcessorPil",
        settings={"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}},
        config={"vision_config": {"patch_size": 16}},
    ),
    "smolvlm2": _smolvlm("smolvlm", 512, 16, 4),
    "smolvlm2-2.2b": _smolvlm("smolvlm", 384, 14, 3),
    "idefics3": _smolvlm("idefics3", 364, 14, 2),
}


def make_variants(photo: PillowImage.Image) -> Mapping[str, PillowImage.Image]:
    """Returns the shapes that exercise the rules: tiny, extremely wide and high images, odd sizes,
    exact multiples of all patches, and halves that are rounded to even."""
    photo = photo.convert("RGB")
    width, height = photo.size
    sizes = {
        "37x23": (37, 23),
        "1x1": (1, 1),
        "398x2": (398, 2),
        "2x398": (2, 398),
        "odd": (201, 133),
        "multiples": (672, 336),
        "halves of 32": (80, 176),
        "halves of 28": (70, 154),
        "large": (1601, 1203),
    }
    return {
        "as it is": photo,
        "rotated": photo.transpose(PillowImage.Transpose.ROTATE_90),
        "wide": photo.crop((0, 0, width, height // 3)),
        **{name: photo.resize(size) for name, size in sizes.items()},
    }


def compute_reference(family: Family, image: PillowImage.Image) -> tuple[list[bytes], str]:
    """Returns the pixels of each tile, and the text that replaces the mark, of transformers."""
    import transformers

    options = {"return_row_col_info": True} if "max_image_size" in family.settings else {}
    processor = getattr(transformers, family.name)(**family.settings)
    output = processor(image, do_rescale=False, do_normalize=False, **options)
    found = np.asarray(output["pixel_values"])
    if family.patch:
        found = _join_patches(family, output, found)
    tiles = [_to_bytes(tile) for tile in found.reshape(-1, *found.shape[-3:])]
    return tiles, _make_text(transformers, family, output, processor)


def compute_ours(family: Family, image: PillowImage.Image) -> tuple[list[bytes], str, int]:
    """Returns our pixels and text, and the number of tokens."""
    data = encode(image)
    plan = load(family.model_type, family.settings, **family.config).plan(read(data))
    assert plan.text.count(plan.token) == plan.num_tokens
    assert plan.grid[0] * plan.grid[1] == plan.num_tokens
    return [tile.tobytes() for tile in decode(data, plan.tiles)], plan.text, plan.num_tokens


def _to_bytes(tile: np.ndarray) -> bytes:
    return np.ascontiguousarray(tile.transpose(1, 2, 0)).astype(np.uint8).tobytes()


def _join_patches(family: Family, output: Any, patches: np.ndarray) -> np.ndarray:
    """Returns the image [3, height, width] from which the patches were made."""
    size, merge = family.patch, family.merge
    if "image_grid_thw" in output:
        _, rows, columns = (int(one) for one in output["image_grid_thw"][0])
        shape = (rows // merge, columns // merge, merge, merge, 3, 2, size, size)
        patches = patches.reshape(shape)[:, :, :, :, :, 0]
        axes = (4, 0, 2, 5, 1, 3, 6)
    else:
        positions = np.asarray(output["image_position_ids"])[0]
        columns, rows = (int(one) + 1 for one in positions.max(axis=0))
        patches = patches[0][: rows * columns].reshape(rows, columns, size, size, 3)
        axes = (4, 0, 2, 1, 3)
    return patches.transpose(axes).reshape(3, rows * size, columns * size)


def _make_text(transformers: Any, family: Family, output: Any, processor: Any) -> str:
    """Returns what the family's processor writes in place of the mark."""
    kind = family.model_type
    if kind.startswith("qwen"):
        own = SimpleNamespace(image_processor=processor, image_token="<|image_pad|>")
        make = transformers.Qwen3VLProcessor.replace_image_token
    elif kind == "gemma3":
        full = "\n\n<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>\n\n"
        own = SimpleNamespace(full_image_sequence=full)
        make = transformers.Gemma3Processor.replace_image_token
    elif kind == "gemma4":
        own = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
        make = transformers.Gemma4Processor.replace_image_token
    elif kind in ("mistral3", "pixtral"):
        from transformers.models.pixtral import processing_pixtral

        own = SimpleNamespace(
            patch_size=family.config["vision_config"]["patch_size"],
            spatial_merge_size=family.config.get("spatial_merge_size", 1),
            image_token="[IMG]",
            image_break_token="[IMG_BREAK]",
            image_end_token="[IMG_END]",
        )
        make: Any = processing_pixtral.PixtralProcessor.replace_image_token
    else:
        vision = family.config["vision_config"]
        side = vision["image_size"] // vision["patch_size"]
        own = SimpleNamespace(
            image_seq_len=side**2 // family.config["scale_factor"] ** 2,
            fake_image_token="<fake_token_around_image>",
            image_token="<image>",
            global_image_token="<global-img>",
        )
        make = transformers.SmolVLMProcessor.replace_image_token
    return make(own, output, 0)


def make_digest(tiles: list[bytes], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for tile in tiles:
        digest.update(hashlib.sha256(tile).digest())
    return digest.hexdigest()[:32]


def iter_cases(paths: list[Path]) -> Iterator[tuple[str, str, PillowImage.Image]]:
    """Yields the family, the name of the case, and the image."""
    for path in paths:
        for variant, image in make_variants(PillowImage.open(path)).items():
            for family in FAMILIES:
                yield family, f"{path.name} {variant}", image


def main(paths: list[Path]) -> int:
    """Compares photos, or writes the digests of the committed ones."""
    if not paths:
        digests: dict[str, dict[str, str]] = {}
        for family, case, image in iter_cases(sorted(PHOTOS.glob("*.[pj]*"))):
            found = make_digest(*compute_reference(FAMILIES[family], image))
            digests.setdefault(family, {})[case] = found
        FILE.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
        return 0
    different = total = 0
    for family, case, image in iter_cases(paths):
        tiles, text, _ = compute_ours(FAMILIES[family], image)
        reference, reference_text = compute_reference(FAMILIES[family], image)
        total += 1
        if tiles != reference or text != reference_text:
            different += 1
            print(f"{family}: {case} ({image.width} × {image.height}): different")
    print(f"{total - different} of {total} are equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main([Path(one) for one in sys.argv[1:]]))
