"""Each architecture gives the logits of mlx-lm's class in prefill, decoding and batches, with the
kernels and without them.

`make test` runs the first case of each architecture, unquantized, with the kernels if they are
built. All others are exhaustive.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import kernels
from models.base import Model
from models.cpu_layout import apply_cpu_layout
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.kernel_switch import BOTH, use_kernels

pytestmark = pytest.mark.recorded

FIRST = {case.config["model_type"]: case.id for case in reversed(cases())}
UNQUANTISED = [
    pytest.param(
        case, id=case.id, marks=() if case.id in FIRST.values() else pytest.mark.exhaustive
    )
    for case in cases()
]
WAYS = [
    BOTH[0],
    pytest.param(False, id="plain", marks=() if kernels.ops() is None else pytest.mark.exhaustive),
]
QUANTISED = [(case, kind) for case in cases() for kind in case.quantized]

# longer than any case's window
PROMPT = 45


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    case: Case
    folder: Path
    reference: Any


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Our model and the reference for one checkpoint. logits: our logits of a prompt evaluated in
    one chunk."""

    case: Case
    reference: Any
    ours: Model
    logits: np.ndarray


@pytest.fixture(scope="module", params=UNQUANTISED)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param.id)
    return Checkpoint(
        case=request.param, folder=folder, reference=parity.save_reference(request.param, folder)
    )


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[Pair]:
    with use_kernels(enabled=request.param):
        ours = parity.load_model(checkpoint.folder)
        apply_cpu_layout(cast(nn.Module, ours))
        logits = parity.prefill(ours, parity.ids(checkpoint.case, PROMPT), [PROMPT])
        yield Pair(case=checkpoint.case, reference=checkpoint.reference, ours=ours, logits=logits)


def test_logits_agree_with_the_reference(pair: Pair) -> None:
    found = parity.find_differences(pair.reference, pair.ours, pair.case)
    assert max(found.values()) < parity.tolerance(pair.case), found


@pytest.mark.exhaustive
@settings(max_examples=5)
@given(cuts=st.sets(st.integers(1, PROMPT - 1), max_size=12))
def test_a_prompt_can_be_evaluated_in_any_chunks(pair: Pair, cuts: set[int]) -> None:
    pieces = [end - start for start, end in pairwise([0, *sorted(cuts), PROMPT])]
    got = parity.prefill(pair.ours, parity.ids(pair.case, PROMPT), pieces)
    assert parity.max_difference(got, pair.logits) < parity.tolerance(pair.case)


@pytest.mark.exhaustive
@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("case", "kind"), QUANTISED, ids=[f"{case.id}-{kind}" for case, kind in QUANTISED]
)
def test_quantized_logits_agree_with_the_reference(case: Case, kind: str, tmp_path: Path) -> None:
    """With the kernels if they are built. Without them, both use the same MLX product."""
    reference, ours = parity.save_reference(case, tmp_path, kind=kind), parity.load_model(tmp_path)
    apply_cpu_layout(cast(nn.Module, ours))
    found = parity.find_differences(reference, ours, case)
    assert max(found.values()) < parity.tolerance(case), found
