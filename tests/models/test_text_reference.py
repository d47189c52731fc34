"""Each architecture gives the logits of transformers, in float32, bfloat16, and 4 and 8 bits.

The references are in text_reference.json, which text_reference.py writes. The config and the names
of the tensors are those that transformers saves.

`make test` runs the first case of each architecture in one of the four formats, in turns. The
others are exhaustive.
"""

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models import architectures
from models.checkpoint_config import architecture_name
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from tests.models import parity, text_reference
from tests.models.text_reference import COLUMNS, LENGTH

pytestmark = pytest.mark.recorded

REFERENCE: Mapping[str, Any] = json.loads(text_reference.FILE.read_text())
FORMATS = ("float32", "bfloat16", "8 bits", "4 bits")

# lengths of the chunks of a prompt
WAYS = {"prefill": [LENGTH], "chunks": [6, 1, 9, 7], "decode": [1] * LENGTH}
# positions that the eight rows of a batch have before its first step
ROWS = (1, 2, 5, 8, 11, 14, 17, 20)
STEPS = 3


def make_runs() -> list[Any]:
    runs: list[Any] = []
    seen = set[str]()
    turns = itertools.cycle(FORMATS)
    for name, case in REFERENCE.items():
        kind = case["config"]["model_type"]
        chosen = None if kind in seen else next(turns)
        seen.add(kind)
        for weights in FORMATS:
            marks = () if weights == chosen else pytest.mark.exhaustive
            runs.append(pytest.param((name, weights), id=f"{name}-{weights}", marks=marks))
    return runs


@cache
def draw_weights(name: str) -> dict[str, mx.array]:
    shapes = text_reference.unfold_names(REFERENCE[name]["tensors"])
    return {
        tensor: mx.array(text_reference.draw_tensor(tensor, shape))
        for tensor, shape in shapes.items()
    }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """alone: the logits [L, V] of each way to compute them. rows: [B, steps, V] of a batch.
    one_by_one: the same steps, each sequence alone. invariant: whether the bits must not depend on
    chunks. expected: the COLUMNS of the reference."""

    alone: Mapping[str, np.ndarray]
    rows: np.ndarray
    one_by_one: np.ndarray
    invariant: bool
    expected: np.ndarray
    tolerance: float


@pytest.fixture(scope="module", params=make_runs())
def outcome(request: pytest.FixtureRequest) -> Outcome:
    name, weights = request.param
    case = REFERENCE[name]
    tensors = draw_weights(name)
    if weights == "bfloat16":
        tensors = {
            tensor: array.astype(mx.bfloat16) if array.dtype == mx.float32 else array
            for tensor, array in tensors.items()
        }
    bits = int(weights.split()[0]) if weights.endswith("bits") else None
    model = architectures.build(case["config"], tensors, bits=bits, vision=False)
    apply_cpu_layout(cast(nn.Module, model))
    text = case["config"].get("text_config", case["config"])
    prompt = text_reference.draw_prompt(text["vocab_size"])
    steps = [prompt[length : length + STEPS] for length in ROWS]
    is_delta = text["model_type"].removesuffix("_text") in parity.DELTA_KINDS
    return Outcome(
        alone={way: parity.prefill(model, prompt, chunks) for way, chunks in WAYS.items()},
        rows=parity.decode_batch(model, [prompt[:length] for length in ROWS], steps),
        one_by_one=np.stack(
            [
                parity.prefill(model, prompt[: length + STEPS], [length, *[1] * STEPS])[-STEPS:]
                for length in ROWS
            ]
        ),
        invariant=is_batch_invariant(model),
        expected=np.array(case["logits"]),
        tolerance=parity.TOLERANCE_OF_DELTAS if is_delta else parity.TOLERANCE,
    )


def test_the_logits_are_those_of_transformers(outcome: Outcome) -> None:
    found = {
        way: parity.max_difference(logits[:, COLUMNS], outcome.expected)
        for way, logits in outcome.alone.items()
    }
    expected = np.stack([outcome.expected[length : length + STEPS] for length in ROWS])
    found["batch"] = parity.max_difference(outcome.rows[..., COLUMNS], expected)
    assert max(found.values()) < outcome.tolerance, found


def test_a_row_of_a_batch_has_the_bits_that_it_has_alone(outcome: Outcome) -> None:
    np.testing.assert_array_equal(outcome.rows, outcome.one_by_one)


def test_cached_positions_do_not_change_a_bit(outcome: Outcome) -> None:
    if not outcome.invariant:
        pytest.skip("chunks of this architecture have other bits; the engine aligns them")
    for way in ("chunks", "decode"):
        np.testing.assert_array_equal(outcome.alone[way], outcome.alone["prefill"])


def test_every_architecture_of_the_documents_is_compared() -> None:
    """Model types that are other names of an architecture count as that one."""
    text = Path("docs/models.md").read_text("utf-8")
    _, _, after = text.partition("## Architectures\n")
    rows = re.findall(r"^\| (`[^|]*`) \|", after.partition("\n## ")[0], re.MULTILINE)
    listed = {kind for row in rows for kind in re.findall(r"`(\w+)`", row)}
    assert len(listed) > 40
    compared = {
        architecture_name(case["config"].get("text_config", case["config"]))
        for case in REFERENCE.values()
    }
    assert {architecture_name({"model_type": kind}) for kind in listed} <= compared
