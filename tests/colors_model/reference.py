"""Writes tests/colors_model/reference.json: the greedy answers of transformers, in float32.

It needs torch; see tests/colors_model/train.py.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from tests.colors_model.drawings import COLORS, draw_named
from tests.colors_model.train import (
    FOLDER,
    IMAGE,
    QUESTIONS,
    get_id,
    make_inputs,
    make_tokenizer,
    render,
)

FILE = Path(__file__).with_name("reference.json")

# the colors of the images of each prompt: each alone, and some of the pairs and triples
NAMES = list(COLORS)
PROMPTS = [
    *([name] for name in NAMES),
    *map(list, itertools.islice(itertools.permutations(NAMES, 2), 0, None, 5)),
    *map(list, itertools.islice(itertools.permutations(NAMES, 3), 0, None, 30)),
]


def compute(prompts: Sequence[Sequence[str]]) -> list[dict[str, object]]:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = make_tokenizer()
    model = Qwen3VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    found: list[dict[str, object]] = []
    for colors in prompts:
        ids = tokenizer.encode(render(len(colors), QUESTIONS[0])).ids
        images = [draw_named(color, index) for index, color in enumerate(colors)]
        inputs = make_inputs([ids], images, get_id(tokenizer, IMAGE))
        end = tokenizer.token_to_id("<|im_end|>")
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False, eos_token_id=end)
        text = tokenizer.decode(output[0, len(ids) :].tolist(), skip_special_tokens=True)
        found.append({"colors": list(colors), "answer": text, "prompt_tokens": len(ids)})
        print(colors, text)
    return found


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(one) for one in compute(PROMPTS))
    FILE.write_text(f"[\n{lines}\n]\n")
