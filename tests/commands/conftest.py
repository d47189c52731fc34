"""The isolated hub, cache and stores of the store tests."""

from tests.store.conftest import hub, nowhere_else

__all__ = ["hub", "nowhere_else"]
