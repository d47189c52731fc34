"""`make bench ARGS=kinds`: every tiny architecture in every kind of quantised weights.

Beside mlx-lm's class, as tests/models/test_parity.py does it for the kinds that each case names.
This tries them all, which takes minutes.
"""

import contextlib
import io
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.models import parity
from tests.models.architectures import Case, cases


def report() -> str:
    """A table: for each kind how many cases there are, the largest difference of any logit among
    those within the tolerance, and what is beyond it."""
    lines = [
        "| quantisation | cases within 1e-4 | largest difference among them | beyond |",
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
    """In any way of evaluating it."""
    with TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        reference = parity.saved(case, Path(place), kind=kind)
        return max(parity.differences(reference, parity.opened(Path(place)), case).values())
