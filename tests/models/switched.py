"""Models on this CPU with our own operations, and without."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from models import kernels

# to parametrise with; what is skipped where the kernels were not built
BOTH = [
    pytest.param(
        True,
        id="kernels",
        marks=pytest.mark.skipif(
            kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}"
        ),
    ),
    pytest.param(False, id="plain"),
]


@contextmanager
def computing(*, by_kernels: bool) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not by_kernels:
            patch.setattr(kernels, "_module", None)
        yield
