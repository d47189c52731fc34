"""How long a request may be, and what is said to one that is longer."""

import pytest

from app.core.jobs import Capacity
from app.core.room import Room

MIB = 1 << 20


def capacity(context: int, *, scarce: bool = False) -> Capacity:
    """A position takes one MiB."""
    return Capacity(
        parallel=2,
        context=context,
        kv_budget=4000 * MIB,
        kv_bytes=context * MIB,
        limited_by_memory=scarce,
    )


@pytest.mark.parametrize(
    ("asked", "loaded", "context"),
    [
        (None, None, 4096),
        (100, None, 100),
        (9999, None, 4096),
        (None, capacity(4096), 4096),
        (100, capacity(100), 100),
        (3000, capacity(70, scarce=True), 70),
    ],
)
def test_a_loaded_engine_knows_best_and_before_that_the_settings(
    asked: int | None, loaded: Capacity | None, context: int
) -> None:
    assert Room(model=4096, asked=asked, capacity=loaded).context == context


@pytest.mark.parametrize(
    ("room", "told"),
    [
        (
            Room(model=4096, asked=None, capacity=None),
            ("the model's context is 4096 tokens", "shorten the prompt"),
        ),
        (
            Room(model=4096, asked=64, capacity=capacity(64)),
            ("the server's context is 64 tokens", "the model's own is 4096", "--context"),
        ),
        (
            Room(model=4096, asked=None, capacity=capacity(64, scarce=True)),
            ("only 64 tokens fit in memory", "about 5001.0 MiB", "can have 64.0 MiB", "--memory"),
        ),
    ],
)
def test_a_refusal_says_what_limits_and_what_to_do(room: Room, told: tuple[str, ...]) -> None:
    for words in told:
        assert words in room.refusal(5000)
