"""Every architecture gives the logits of mlx-lm's class, in every way of evaluating it: as it is
served, by the kernels and without them."""

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

from models.base import Model
from models.cpu_layout import apply_cpu_layout
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.switched import BOTH, computing

QUANTISED = [(case, kind) for case in cases() for kind in case.quantised]

# longer than any case's window
PROMPT = 45


@dataclass(frozen=True, kw_only=True)
class Saved:
    case: Case
    folder: Path
    reference: Any


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same checkpoint as both see it. whole: our logits of a prompt that is evaluated at
    once."""

    case: Case
    reference: Any
    ours: Model
    whole: np.ndarray


@pytest.fixture(scope="module", params=cases(), ids=lambda case: case.id)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param.id)
    return Saved(case=request.param, folder=folder, reference=parity.saved(request.param, folder))


@pytest.fixture(scope="module", params=BOTH)
def pair(request: pytest.FixtureRequest, saved: Saved) -> Iterator[Pair]:
    with computing(by_kernels=request.param):
        ours = parity.opened(saved.folder)
        apply_cpu_layout(cast(nn.Module, ours))
        whole = parity.our_prefilled(ours, parity.ids(saved.case, PROMPT), [PROMPT])
        yield Pair(case=saved.case, reference=saved.reference, ours=ours, whole=whole)


def test_logits_are_those_of_the_reference(pair: Pair) -> None:
    found = parity.differences(pair.reference, pair.ours, pair.case)
    assert max(found.values()) < parity.tolerance(pair.case), found


@settings(max_examples=5)
@given(cuts=st.sets(st.integers(1, PROMPT - 1), max_size=12))
def test_a_prompt_may_be_evaluated_in_any_pieces(pair: Pair, cuts: set[int]) -> None:
    pieces = [end - start for start, end in pairwise([0, *sorted(cuts), PROMPT])]
    got = parity.our_prefilled(pair.ours, parity.ids(pair.case, PROMPT), pieces)
    assert parity.largest(got, pair.whole) < parity.tolerance(pair.case)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("case", "kind"), QUANTISED, ids=[f"{case.id}-{kind}" for case, kind in QUANTISED]
)
def test_logits_of_quantised_weights_are_those_of_the_reference(
    case: Case, kind: str, tmp_path: Path
) -> None:
    """As it is served here: without kernels it is MLX's own product, which is the reference's."""
    reference, ours = parity.saved(case, tmp_path, kind=kind), parity.opened(tmp_path)
    apply_cpu_layout(cast(nn.Module, ours))
    found = parity.differences(reference, ours, case)
    assert max(found.values()) < parity.tolerance(case), found
