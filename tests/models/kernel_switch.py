"""Run a test with the CPU kernels and without them."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from models import kernels

# for parametrize; the case with kernels is skipped if they were not built
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
def use_kernels(*, enabled: bool) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not enabled:
            patch.setattr(kernels, "_module", None)
        yield
