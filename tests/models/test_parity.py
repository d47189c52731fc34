"""Every architecture gives the logits of mlx-lm's class, in every way of evaluating it."""

from pathlib import Path

import pytest

from tests.models import parity
from tests.models.architectures import Case, cases

QUANTISED = [(case, kind) for case in cases() for kind in case.quantised]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_logits_are_those_of_the_reference(case: Case, tmp_path: Path) -> None:
    reference = parity.saved(case, tmp_path)
    found = parity.differences(reference, parity.opened(tmp_path), case)
    assert max(found.values()) < parity.TOLERANCE, found


@pytest.mark.parametrize(
    ("case", "kind"), QUANTISED, ids=[f"{case.id}-{kind}" for case, kind in QUANTISED]
)
def test_logits_of_quantised_weights_are_those_of_the_reference(
    case: Case, kind: str, tmp_path: Path
) -> None:
    reference = parity.saved(case, tmp_path, kind=kind)
    found = parity.differences(reference, parity.opened(tmp_path), case)
    assert max(found.values()) < parity.TOLERANCE, found
