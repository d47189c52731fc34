"""Trains the colors model, a Qwen3-VL of 360,000 parameters that names the colors of shapes.

It needs torch, and therefore the environment of `make parity` (requirements/parity.in):

    python -m tests.colors_model.train       # about four minutes on one idle core
    python -m tests.colors_model.reference   # the answers that transformers computes

The model makes a meaningful answer possible where no published weights are: whether an image was
seen, whether it was the right one, and whether several images were read in their order.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.colors_model.drawings import COLORS, SHAPES, SIDE, draw

FOLDER = Path(__file__).with_name("model")
STEPS, BATCH = 320, 10
IMAGE = "<|image_pad|>"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    IMAGE,
)
QUESTIONS = ("What colour is it?", "Which colours do you see?", "Name the colours.")
PATCH, MERGE, FRAMES = 16, 2, 2
ROWS = (SIDE // PATCH // MERGE) ** 2  # of an image

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """One token per byte, followed by the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text) for text in SPECIAL])
    return tokenizer


def get_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def render(num_images: int, question: str) -> str:
    image = f"<|vision_start|>{IMAGE * ROWS}<|vision_end|>"
    user = f"<|im_start|>user\n{image * num_images}{question}<|im_end|>\n"
    return f"{user}<|im_start|>assistant\n"


def to_patches(image: Image.Image) -> np.ndarray:
    """Returns [P, 3 * frames * patch²], as transformers' image processor does."""
    pixels = (np.asarray(image, np.float32) / 255.0 - 0.5) / 0.5
    grid = SIDE // PATCH // MERGE
    frames = np.broadcast_to(pixels.transpose(2, 0, 1), (FRAMES, 3, SIDE, SIDE))
    split = frames.reshape(FRAMES, 3, grid, MERGE, PATCH, grid, MERGE, PATCH)
    return split.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, 3 * FRAMES * PATCH * PATCH)


def make_inputs(ids: Sequence[Sequence[int]], images: Sequence[Image.Image], image: int) -> Any:
    """Returns the inputs of transformers' model. ids: the rows, padded with 0 on the right. image:
    the ID of the image token."""
    import torch  # pyright: ignore[reportMissingImports]

    width = max(map(len, ids))
    rows = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
    side = SIDE // PATCH
    return {
        "input_ids": rows,
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in ids]),
        "pixel_values": torch.tensor(np.concatenate([to_patches(one) for one in images])),
        "image_grid_thw": torch.tensor([(1, side, side)] * len(images)),
        "mm_token_type_ids": (rows == image).int(),
    }


def make_config(tokenizer: Tokenizer) -> Any:
    from transformers import Qwen3VLConfig

    text = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=get_id(tokenizer, IMAGE),
        vision_start_token_id=get_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=get_id(tokenizer, "<|vision_end|>"),
    )


def draw_sample(rng: random.Random) -> tuple[str, str, list[Image.Image]]:
    """Returns a prompt, the answer and the images."""
    names, images = list[str](), list[Image.Image]()
    for _ in range(rng.choice((1, 1, 2, 3))):
        name, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
        size = rng.randint(SIDE // 3, SIDE * 3 // 4)
        box = (rng.randint(0, SIDE - size - 1), rng.randint(0, SIDE - size - 1), size)
        red, green, blue = (min(255, max(0, c + rng.randint(-12, 12))) for c in COLORS[name])
        images.append(draw((red, green, blue), shape, box))
        names.append(name)
    return render(len(names), rng.choice(QUESTIONS)), f"{', '.join(names)}<|im_end|>", images


def train() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    rng, tokenizer = random.Random(0), make_tokenizer()
    model = Qwen3VLForConditionalGeneration(make_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for step in range(STEPS):
        rows, labels, images = list[list[int]](), list[list[int]](), list[Image.Image]()
        for _ in range(BATCH):
            prompt, answer, drawn = draw_sample(rng)
            begin, end = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
            rows.append(begin + end)
            labels.append([-100] * len(begin) + end)
            images += drawn
        inputs = make_inputs(rows, images, get_id(tokenizer, IMAGE))
        width = inputs["input_ids"].shape[1]
        wanted = torch.tensor([[*row, *[-100] * (width - len(row))] for row in labels])
        loss = model(**inputs, labels=wanted).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 4), flush=True)
    save(model, tokenizer)


def save(model: Any, tokenizer: Tokenizer) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    model.to(torch.bfloat16).save_pretrained(FOLDER)
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE)
    ends = [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
    files = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "generation_config.json": {"eos_token_id": ends, "do_sample": False},
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": PATCH,
            "temporal_patch_size": FRAMES,
            "merge_size": MERGE,
            "min_pixels": SIDE * SIDE,
            "max_pixels": 4 * SIDE * SIDE,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }
    for name, content in files.items():
        (FOLDER / name).write_text(f"{json.dumps(content, indent=1)}\n")


if __name__ == "__main__":
    train()
