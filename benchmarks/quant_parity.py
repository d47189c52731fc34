"""`make bench ARGS=kinds`: each tiny architecture with each kind of quantized weights.

It compares the logits with mlx-lm's class, as tests/models/test_parity.py does for the kinds that
each case names. All kinds take minutes.
"""

import contextlib
import io
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.models import parity
from tests.models.architectures import Case, cases


def report() -> str:
    """A table: for each kind the number of cases, the largest difference of a logit among those
    within the tolerance, and the cases beyond it."""
    lines = [
        "| quantization | cases within 1e-4 | largest difference among them | beyond |",
        "|---|---|---|---|",
    ]
    for kind in parity.KINDS:
        found = {case.id: _largest_difference(case, kind) for case in cases()}
        within = {id: value for id, value in found.items() if value < parity.TOLERANCE}
        beyond = [f"{id} ({value:.1e})" for id, value in found.items() if id not in within]
        largest = max(within.values(), default=0.0)
        lines.append(
            f"| {kind} | {len(within)} of {len(found)} | {largest:.1e} | {', '.join(beyond)} |"
        )
    return "\n".join(lines)


def _largest_difference(case: Case, kind: str) -> float:
    """The largest difference in all ways of evaluation."""
    with TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        reference = parity.save_reference(case, Path(place), kind=kind)
        return max(
            parity.find_differences(reference, parity.load_model(Path(place)), case).values()
        )
