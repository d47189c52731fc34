"""`make bench ARGS=first-image`: seconds from an image to the first token, and those of mlx-vlm.

Each family has four blocks of a published tower and four layers of a text model with random float32
weights, saved by transformers. Ours is a real server: the clock begins when the request is sent, so
it counts base64, HTTP, the decoder process and the cache. mlx-vlm runs in its own process without
HTTP: it counts transformers' image processor, the tower and the prompt. Each round has a different
photo, so that neither side has seen it. Then, while an image of 1,024 tokens is encoded for one
client of Qwen3-VL, the delays of another client's tokens are measured over HTTP. `MLX_VLM` is a
Python with mlx-vlm, torch and transformers; its MLX uses OpenBLAS if it is installed, because the
wheel contains only the reference BLAS.
"""

import base64
import io
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from PIL import Image
from tokenizers import AddedToken

from app.images.input import read_image
from benchmarks.cpu_http import find_blas
from benchmarks.image_towers import MLX_VLM_VARIABLE
from benchmarks.stream_counter import read_server_cpu
from tests import tiny, tiny_vision
from tests.images import models
from tests.server_process import ServerProcess, run_server

ROUNDS = 3

# tokens of the stream before the image is sent
NUM_ALONE = 300
WORKER = Path(__file__).with_name("image_answers_worker.py")
QUESTION = "What does this picture show? Answer in one sentence."

_TEXT: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1 << 15,
    "bos_token_id": tiny.END - 1,
    "eos_token_id": tiny.END,
    "pad_token_id": tiny.END,
}
_SIGLIP: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """model, processor: classes of transformers. vision: `vision_config`. text: keys of
    `text_config`. config: other keys of the config. settings: preprocessor_config.json. options:
    of a call of the processor. side: of the photo in pixels. ids: the config's key for the ID of
    each mark of tests/tiny_vision.py."""

    model: str
    processor: str
    vision: Mapping[str, Any]
    ids: tuple[str, ...]
    side: int
    text: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


_QWEN_IDS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
_MROPE = {"rope_type": "default", "rope_theta": 1e6}

FAMILIES: Mapping[str, Family] = {
    "qwen3_vl": Family(
        model="Qwen3VLForConditionalGeneration",
        processor="Qwen2VLImageProcessorPil",
        vision={
            "depth": 4,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 1024,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        text={
            "rope_parameters": {**_MROPE, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
        },
        ids=_QWEN_IDS,
        side=512,
        settings={
            "patch_size": 16,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    ),
    "qwen2_5_vl": Family(
        model="Qwen2_5_VLForConditionalGeneration",
        processor="Qwen2VLImageProcessorPil",
        vision={
            "depth": 4,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 1024,
            "fullatt_block_indexes": [3],
        },
        text={"rope_parameters": {**_MROPE, "mrope_section": [8, 12, 12]}},
        ids=_QWEN_IDS,
        side=504,
        settings={"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056},
    ),
    "gemma3": Family(
        model="Gemma3ForConditionalGeneration",
        processor="Gemma3ImageProcessorPil",
        vision={**_SIGLIP, "image_size": 896, "patch_size": 14, "vision_use_head": False},
        text={
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 512,
        },
        config={"mm_tokens_per_image": 256},
        ids=("boi_token_index", "image_token_index", "eoi_token_index"),
        side=896,
        settings={"size": {"height": 896, "width": 896}},
    ),
    "gemma4": Family(
        model="Gemma4ForConditionalGeneration",
        processor="Gemma4ImageProcessorPil",
        vision={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 4,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
        },
        text={
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 0,
            "sliding_window": 512,
        },
        config={"audio_config": None},
        ids=("boi_token_id", "image_token_id", "eoi_token_id"),
        side=768,
        settings={"max_soft_tokens": 280},
    ),
    "mistral3": Family(
        model="Mistral3ForConditionalGeneration",
        processor="PixtralImageProcessorPil",
        vision={
            "model_type": "pixtral",
            "num_hidden_layers": 4,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 1540,
        },
        text={"model_type": "mistral", "sliding_window": None},
        config={"spatial_merge_size": 2},
        ids=("image_token_id",),
        side=504,
        settings={
            "size": {"longest_edge": 1540},
            "patch_size": {"height": 28, "width": 28},
        },
    ),
    "smolvlm": Family(
        model="SmolVLMForConditionalGeneration",
        processor="SmolVLMImageProcessorPil",
        vision={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 4,
            "image_size": 512,
            "patch_size": 16,
        },
        text={"model_type": "llama"},
        config={"scale_factor": 4},
        ids=("image_token_id",),
        side=1024,
        settings={"size": {"longest_edge": 1024}, "max_image_size": {"longest_edge": 512}},
        options={"return_row_col_info": True},
    ),
}


def report() -> str:
    lines = [
        "image to first token, s (CPU s): a server of ours, and mlx-vlm without HTTP:",
        "family      prompt tokens  ours           mlx-vlm        ratio          equal tokens",
    ]
    python = os.environ.get(MLX_VLM_VARIABLE)
    if python is None:
        return f"first-image: not measured ({MLX_VLM_VARIABLE} names no Python with mlx-vlm)"
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            lines.append(compare(python, name, Path(place) / "model"))
    return "\n".join(lines)


def compare(python: str, name: str, folder: Path) -> str:
    """Returns a row of the table."""
    family = FAMILIES[name]
    arguments = json.dumps(make_arguments(name, folder))
    subprocess.run([python, str(WORKER), "save", arguments], check=True, stderr=subprocess.DEVNULL)
    write_texts(name, folder)
    blas = find_blas()
    worker = subprocess.Popen(
        [python, str(WORKER), "answer", arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **({"LD_PRELOAD": blas} if blas else {})},
        text=True,
    )
    try:
        delays = ""
        with run_server(str(folder)) as server:
            ours, theirs, num_equal, num_tokens = list[Any](), list[Any](), 0, 0
            for number in range(ROUNDS + 1):  # the first one warms up
                photo = folder.parent / f"{number}.png"
                photo.write_bytes(make_photo(family.side, number))
                *found, text, num_tokens = measure(server, photo)
                ids = make_ids(name, photo, folder)
                assert len(ids) == num_tokens, (len(ids), num_tokens)
                *others, token = ask(worker, json.dumps({"photo": str(photo), "ids": ids}))
                num_equal += decode(name, token) == text
                ours.append(found)
                theirs.append(others)
            if name == "qwen3_vl":
                photo.write_bytes(make_photo(1024, ROUNDS + 1))
                delays = measure_delays(server, photo)
    finally:
        worker.kill()
        worker.wait()
    ours_median, theirs_median = take_medians(ours), take_medians(theirs)
    ratios = [a / b for a, b in zip(ours_median, theirs_median, strict=True)]
    row = [f"{wall:5.2f} ({cpu:5.2f})" for wall, cpu in (ours_median, theirs_median, ratios)]
    return f"{name:10}  {num_tokens:13}  {'  '.join(row)}  {num_equal} of {ROUNDS + 1}{delays}"


def take_medians(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the medians of the seconds and the CPU seconds, without the first round."""
    return median(one[0] for one in rounds[1:]), median(one[1] for one in rounds[1:])


def make_arguments(name: str, folder: Path) -> Mapping[str, Any]:
    """Returns what the worker reads."""
    family, marks = FAMILIES[name], tiny_vision.FAMILIES[name].marks
    vocab_size = tiny.VOCAB + len(marks)
    first = tiny.VOCAB + (len(marks) - len(family.ids) if len(family.ids) > 1 else 0)
    config = {
        **family.config,
        **{key: first + number for number, key in enumerate(family.ids)},
        "text_config": {**_TEXT, **family.text, "vocab_size": vocab_size},
        "vision_config": family.vision,
        "tie_word_embeddings": name.startswith("gemma"),
        "eos_token_id": tiny.END,
    }
    return {
        "folder": str(folder),
        "model": family.model,
        "config": config,
        "processor": family.processor,
        "settings": family.settings,
        "options": family.options,
    }


def ask(worker: "subprocess.Popen[str]", line: str) -> Any:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def make_tokenizer(name: str) -> Any:
    tokenizer = tiny.tokenizer()
    marks = tiny_vision.FAMILIES[name].marks
    tokenizer.add_special_tokens([AddedToken(mark) for mark in marks])
    return tokenizer


def decode(name: str, token: int) -> str:
    return make_tokenizer(name).decode([token])


def make_template(name: str) -> str:
    """The chat template of a family: a Qwen model has the mark between two others."""
    marks = "".join(tiny_vision.FAMILIES[name].marks) if name.startswith("qwen") else None
    mark = marks or load_processor(name).mark
    old = f"{tiny_vision.START}{tiny_vision.PAD}{tiny_vision.END}"
    return tiny_vision.CHAT_TEMPLATE.replace(old, mark)


def load_processor(name: str) -> Any:
    family = FAMILIES[name]
    config = {**family.config, "vision_config": family.vision}
    return models.load(name, family.settings, **config)


def write_texts(name: str, folder: Path) -> None:
    """Writes the files besides the weights, and the config as published, which mlx-vlm reads: with
    the keys of transformers 4."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    rope = text.get("rope_parameters", {})
    if "rope_theta" in rope:
        text["rope_theta"] = rope["rope_theta"]
    if "mrope_section" in rope:
        text["rope_scaling"] = {**rope, "type": "default"}
    if name.startswith("qwen"):
        config["vision_config"]["model_type"] = name
    if name == "qwen2_5_vl":
        config = {**text, **config}
        del config["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(name).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
        "chat_template": make_template(name),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FAMILIES[name].settings))


def make_photo(side: int, number: int) -> bytes:
    """A PNG file with smooth colors, another one for each number."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def make_ids(name: str, photo: Path, folder: Path) -> list[int]:
    """Returns the prompt's IDs, including the image's."""
    processor = load_processor(name)
    plan = processor.plan(read_image(photo.read_bytes(), param="photo"))
    mark = make_template(name).split("'image' %}")[1].split("{%")[0]
    text = f"user: {mark}{QUESTION}assistant: ".replace(processor.mark, plan.text, 1)
    return make_tokenizer(name).encode(text, add_special_tokens=False).ids


def measure_delays(server: ServerProcess, photo: Path) -> str:
    """Returns a line with the delays of a stream's tokens, alone and while an image is processed
    for another client."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 1 << 14,
        "stream": True,
        "logit_bias": {str(tiny.END): -100},
    }
    times: list[float] = []
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=600) as client:
        with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as reply:
            began, image = 0.0, None
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                times.append(time.perf_counter())
                if len(times) == NUM_ALONE:
                    began, image = times[-1], pool.submit(measure, server, photo)
                if image is not None and image.done():
                    break
        assert image is not None
        seconds, *_, num_tokens = image.result()
    delays = [(end, end - start) for start, end in pairwise(times)]
    alone = [delay for end, delay in delays[20:] if end <= began]
    beside = [delay for end, delay in delays if end > began]
    return (
        f"\n    a stream beside an image, {num_tokens} tokens in {seconds:.1f} s: delay of a token "
        f"alone {1e3 * median(alone):.1f} ms, beside the image median "
        f"{1e3 * median(beside):.1f} ms, longest {1e3 * max(beside):.0f} ms"
    )


def measure(server: ServerProcess, photo: Path) -> tuple[float, float, str, int]:
    """Returns the seconds until the first token, the server's CPU seconds, the token as text, and
    the number of prompt tokens."""
    url = "data:image/png;base64," + base64.b64encode(photo.read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
    }
    cpu_began, began = read_server_cpu(server), time.perf_counter()
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
    seconds, cpu = time.perf_counter() - began, read_server_cpu(server)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    used = cpu.front + cpu.runner - cpu_began.front - cpu_began.runner
    [token] = answer["choices"][0]["logprobs"]["content"]
    return seconds, used, token["token"], answer["usage"]["prompt_tokens"]


if __name__ == "__main__":
    print(report())
