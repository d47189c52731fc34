"""The same hub, cache and stores of a test's own as app.store's tests have."""

from tests.store.conftest import hub, nowhere_else

__all__ = ["hub", "nowhere_else"]
