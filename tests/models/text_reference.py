"""Writes tests/models/text_reference.json: the logits of transformers for tiny models.

It needs torch, and therefore the environment of `make parity` (requirements/parity.in):

    python -m tests.models.text_reference [PART OF A NAME]…

With arguments, only these cases are computed again. The folder that transformers saves gives
config.json and the names and shapes of the tensors. A tensor is drawn from its name, so that the
file contains only shapes. The numbers of a matrix are sixteen multiples of a power of two, and each
group of 64 has the smallest and the largest one. So the same weights are exact in float32, in
bfloat16, and quantized to 4 and to 8 bits, and one reference serves all four.
"""

import itertools
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("text_reference.json")

LENGTH = 23
# the logits that the file contains
COLUMNS = slice(None, None, 13)

# architectures that select positions by scores, which are often equal with these weights
TIES = ("deepseek_v32", "glm_moe_dsa")

_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")
# weights of one dimension that multiply
_FACTORS = re.compile(r"(norm\w*|\bln_\w+|weight|scale|scalar|\bD)(\.weight)?$")


def draw_tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """The tensor of a checkpoint, drawn from its name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if len(shape) < 2:
        # coarse, so that bfloat16 has the sum with 1, which some norms are stored without
        drawn = np.round(0.1 * np.asarray(rng.standard_normal(shape)) * 32) / 32
        return np.asarray(drawn + bool(_FACTORS.search(name)), np.float32)
    numbers = rng.integers(-8, 8, shape)
    # the ends of the range, so that every group contains one of them
    numbers = np.where(rng.random(shape) < 0.5, np.where(numbers < 0, -8, 7), numbers)
    step = 2.0 ** -math.ceil(math.log2(6 * shape[-1] ** 0.5))
    return (step * numbers).astype(np.float32)


def draw_prompt(vocab: int) -> list[int]:
    return np.random.default_rng(1).integers(0, vocab, LENGTH).tolist()


def fold_names(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Joins tensors whose names differ in one number, such as `layers.0-3.mlp.up_proj.weight`."""
    folded = {name: list(shape) for name, shape in shapes.items()}
    for place in range(3):
        groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
        found: dict[str, list[int]] = {}
        for name, shape in folded.items():
            parts = name.split(".")
            numbers = [i for i, part in enumerate(parts) if _NUMBERS.fullmatch(part)]
            if place >= len(numbers):
                found[name] = shape
                continue
            before, after = parts[: numbers[place]], parts[numbers[place] + 1 :]
            key = (".".join(before), ".".join(after), tuple(shape))
            groups.setdefault(key, []).append(int(parts[numbers[place]]))
        for (before, after, shape), values in groups.items():
            for first, last in _find_ranges(sorted(values)):
                span = f"{first}-{last}" if last > first else f"{first}"
                found[".".join(filter(None, (before, span, after)))] = list(shape)
        folded = found
    return folded


def unfold_names(folded: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    return {
        ".".join(parts): shape
        for pattern, shape in folded.items()
        for parts in itertools.product(*map(_expand, pattern.split(".")))
    }


def _find_ranges(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = previous = values[0]
    for value in [*values[1:], None]:
        if value is None or value != previous + 1:
            yield start, previous
            start = value if value is not None else 0
        previous = value if value is not None else 0


def _expand(part: str) -> list[str]:
    if (ends := _NUMBERS.fullmatch(part)) is None:
        return [part]
    return [str(number) for number in range(int(ends[1]), int(ends[2] or ends[1]) + 1)]


def main(filters: Sequence[str]) -> None:
    from tests.models import transformers_parity
    from tests.models.architectures import cases

    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() and filters else {}
    for case in [*cases(), *transformers_parity.WITHOUT_MLX_LM]:
        if transformers_parity.explain_absence(case) or case.config["model_type"] in TIES:
            continue
        if not filters or any(part in case.id for part in filters):
            print(case.id, flush=True)
            try:
                known[case.id] = transformers_parity.describe_reference(case)
            except Exception as error:  # compute the other cases after any error
                print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
    lines = (
        f"{json.dumps(name)}:{json.dumps(row, separators=(',', ':'))}"
        for name, row in sorted(known.items())
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
